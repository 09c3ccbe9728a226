"""A whole world under real mpirun, with ranks that play a scene: how it ends, and that nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hpc_rollart.config import RunConfig
from hpc_rollart.launch import processes, scratch, world
from hpc_rollart.launch.local import run_world
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.world import Outcome, World

Make = Callable[..., tuple[RunConfig, RunDir]]
pytestmark = pytest.mark.timeout(120)
SCRATCH = ("/tmp", "/dev/shm")
FAKE = "tests.launch.fake_rank"


def play(config: RunConfig, run: RunDir, on_poll: Callable[[World], None] = lambda _: None) -> Outcome:
    """Run the scene to its end and check that it left nothing."""
    outcome = run_world(config, run, on_poll, rank_module=FAKE)
    assert processes.of_run(run.run_id) == []
    assert not scratch_folders(run)
    return outcome


def scratch_folders(run: RunDir) -> list[Path]:
    """Return the scratch folders of the run that are on this machine now."""
    found = []
    for base in SCRATCH:
        for lock in Path(base).glob("rollart-*/owner.lock"):
            with contextlib.suppress(FileNotFoundError):  # that of another run, which ended meanwhile
                found += [lock.parent] * (lock.read_text() == run.run_id)
    return found


def ranks(run: RunDir) -> list[dict[str, object]]:
    """Return what each rank wrote about itself."""
    return [json.loads((run.path / f"rank-{rank}.json").read_text()) for rank in range(4)]


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait up to a minute."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"waited a minute for {what}"
        time.sleep(0.05)


def state(run: RunDir) -> str:
    """Return the state in status.json."""
    path = run.path / "status.json"
    return json.loads(path.read_text())["state"] if path.exists() else ""


def test_components_become_contiguous_ranks_of_one_world_in_file_order(world_of: Make) -> None:
    config, run = world_of("done")
    assert play(config, run) == Outcome("done")
    found = ranks(run)
    assert [rank["component"] for rank in found] == ["env", "env", "trainer", "generate"]
    assert {rank["size"] for rank in found} == {4}


def test_each_rank_has_the_threads_of_its_component_and_no_access_to_a_hub(
    world_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    config, run = world_of("done")
    play(config, run)
    found = ranks(run)
    assert [rank["OMP_NUM_THREADS"] for rank in found] == ["1", "1", "1", "2"]
    assert {rank["HF_HUB_OFFLINE"] for rank in found} == {"1"}
    assert {rank["TOKENIZERS_PARALLELISM"] for rank in found} == {"false"}
    assert {rank["ROLLART_RUN_ID"] for rank in found} == {run.run_id}
    assert all(rank["slurm"] == [] for rank in found)


def test_no_rank_listens_on_any_network_interface(world_of: Make) -> None:
    config, run = world_of("forever")
    seen: list[tuple[int, str]] = []

    def look(world: World) -> None:
        if state(run) == "running" and not world.stopping:
            pids = {int(str(rank["pid"])) for rank in ranks(run)}
            seen.extend(
                (pid, connection.laddr.ip)
                for pid in pids
                for connection in psutil.Process(pid).net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            )
            world.stop()

    assert play(config, run, look).state == "interrupted"
    assert seen == []


def test_first_interrupt_lets_the_ranks_end_in_good_order(world_of: Make) -> None:
    config, run = world_of("forever")

    def interrupt(world: World) -> None:
        if state(run) == "running" and not world.stopping:
            os.kill(os.getpid(), signal.SIGINT)

    assert play(config, run, interrupt) == Outcome("interrupted", "stopped on request")
    assert state(run) == "interrupted"


def test_second_interrupt_ends_ranks_that_ignore_the_first(world_of: Make) -> None:
    config, run = world_of("deaf")
    sent: list[float] = []

    def interrupt(world: World) -> None:
        if state(run) == "running" and len(sent) < 2:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    assert play(config, run, interrupt).state == "interrupted"
    assert state(run) == "interrupted"  # written by the launcher: the coordinator could not


def test_ranks_that_ignore_the_request_are_ended_at_the_deadline(
    world_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = world_of("deaf")
    monkeypatch.setattr(type(config), "stop_deadline_s", 0.5)
    monkeypatch.setattr(world, "_MARGIN_S", 0.5)

    def interrupt(world: World) -> None:
        if state(run) == "running" and not world.stopping:
            world.stop()

    assert play(config, run, interrupt).state == "interrupted"


def test_interrupt_while_starting_ends_the_run_at_once(world_of: Make) -> None:
    config, run = world_of("never-ready")

    def interrupt(world: World) -> None:
        if (run.path / "rank-3.json").exists() and not world.stopping:
            os.kill(os.getpid(), signal.SIGINT)

    assert play(config, run, interrupt).state == "interrupted"


def test_failed_rank_is_named_with_its_host_and_log(world_of: Make) -> None:
    config, run = world_of("fail")
    outcome = play(config, run)
    log = run.path / "logs" / "0" / "env-1.log"
    assert outcome == Outcome("failed", f"rank 1 (env on here): out of luck; see {log}")
    assert state(run) == "failed"


def test_crash_without_a_word_shows_the_end_of_mpirun_log(world_of: Make) -> None:
    config, run = world_of("crash")
    outcome = play(config, run)
    assert outcome.state == "failed"
    assert "the fake crashed on purpose" in outcome.message
    assert "logs/0/mpirun.log" in outcome.message


def test_ranks_that_never_get_to_work_fail_at_the_start_deadline(
    world_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_MARGIN_S", 1.0)
    config, run = world_of("never-ready", start_deadline_s=0.5)
    outcome = play(config, run)
    assert outcome.state == "failed"
    assert "the 4 ranks were not all at work after" in outcome.message


def test_coordinator_that_stops_reporting_fails_the_run(
    world_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_MARGIN_S", 1.0)
    config, run = world_of("silent", heartbeat_s=0.5)
    outcome = play(config, run)
    assert outcome.state == "failed"
    assert "the coordinator (component env) has not reported for 2 s (launch.heartbeat_s" in outcome.message


def test_rank_that_stays_after_the_end_is_ended_and_reported(
    world_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_LEAVE_GRACE_S", 0.5)
    config, run = world_of("linger")
    outcome = play(config, run)
    assert outcome == Outcome("failed", "all steps were done, but then ranks did not leave")


def test_process_that_left_the_process_tree_is_ended_too(world_of: Make) -> None:
    config, run = world_of("orphan")
    assert play(config, run) == Outcome("done")
    orphan = int((run.path / "orphan").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # or it is dead, and nobody has asked how it died yet
        assert psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE


def test_killed_launcher_takes_its_world_with_it(world_of: Make, tmp_path: Path) -> None:
    _config, run = world_of("forever")
    script = (
        "import sys; from pathlib import Path; from hpc_rollart.config import load_resolved;"
        "from hpc_rollart.launch.local import run_world; from hpc_rollart.launch.rundir import RunDir;"
        "run = RunDir(Path(sys.argv[1]), sys.argv[2]);"
        f"run_world(load_resolved(run.path), run, lambda world: None, rank_module={FAKE!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(run.path), run.run_id])
    try:
        wait_until(lambda: state(run) == "running", "the world")
        assert len(scratch_folders(run)) == 2
        child.kill()
        child.wait()
        wait_until(lambda: processes.of_run(run.run_id) == [], "the ranks to go")
    finally:
        child.kill()
        processes.end_all(run.run_id, grace_s=0.0)
    for base in SCRATCH:  # the next launcher clears up
        with scratch.directory(Path(base), "next"):
            pass
    assert not scratch_folders(run)


def test_signal_handlers_are_as_before_after_a_run(world_of: Make) -> None:
    before = signal.getsignal(signal.SIGINT)
    config, run = world_of("done")
    play(config, run)
    assert signal.getsignal(signal.SIGINT) is before


def test_world_runs_outside_the_main_thread_too(world_of: Make) -> None:
    config, run = world_of("done")
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(play(config, run)))
    thread.start()
    thread.join(60)
    assert outcomes == [Outcome("done")]
