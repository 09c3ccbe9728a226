"""A run in Slurm loses its job and its nodes, and each step still comes out as if nothing had been."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_rollart.analysis.recount import audit
from tests.slurm.lifecycle import ROLLART, ROOT, Job, folder, small_config, submit, write

if TYPE_CHECKING:
    from tests.slurm.conftest import MakeTestbed, Testbed

pytestmark = pytest.mark.timeout(900)


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def testbed(make_testbed: MakeTestbed) -> Testbed:
    """A testbed of its own: other tests' jobs would preempt these, and these break nodes."""
    return make_testbed()


@pytest.fixture(scope="module")
def here(testbed: Testbed) -> Iterator[Path]:
    path = folder(testbed, "lifecycle")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(here: Path, quickstart_model: str) -> list[dict[str, Any]]:
    """The metrics of the same run on one machine, from its first step to its last without a break."""
    config = small_config(quickstart_model)
    config["components"]["generate"] |= {"nodes": 1, "ranks_per_node": 2}
    run = here / "undisturbed"
    command = [*ROLLART, "run", str(write(config, here / "local.yaml")), "--dir", str(run), "--no-progress"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return Job(None, run, "").metrics()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saga(testbed: Testbed, here: Path, quickstart_model: str) -> Job:
    """A run that goes through it all, in this order.

    `scancel --signal=USR1`, `scontrol requeue`, preemption by a job of higher priority, the loss of a node.
    """
    config = small_config(quickstart_model)
    for name, partition in {"trainer": "low-h100", "generate": "low-h20", "env": "low"}.items():
        config["components"][name]["partition"] = partition
    job = submit(testbed, write(config, here / "saga.yaml"), here / "saga")
    job.wait_steps(4)
    testbed.run("scancel", "--signal=USR1", job.id)
    job.wait(lambda: len(job.events("requeued")) == 1, "the first requeue")
    job.wait_steps(14, attempt=1)
    testbed.run("scontrol", "requeue", job.id)
    job.wait(lambda: len(job.events("job starts")) == 3, "the second requeue")
    job.wait_steps(24, attempt=2)
    urgent = testbed.run(
        "sbatch", "--parsable", "--partition=h100", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    job.wait(lambda: len(job.events("job starts")) == 4, "the end of the preemption")
    assert not testbed.run("squeue", "-h", "-j", urgent.stdout.strip()).stdout
    job.wait_steps(34, attempt=3)
    testbed.node("kill", "h20-2")
    try:
        job.wait(lambda: len(job.events("attempt starts")) == 5, "the attempt after the node's loss", 60)
        job.finish()
    finally:
        testbed.node("start", "h20-2")
    return job


def test_every_step_is_there_once_and_came_out_as_in_an_undisturbed_run(
    saga: Job, undisturbed: list[dict[str, Any]]
) -> None:
    lines = saga.metrics()
    assert [line["step"] for line in lines] == list(range(60))
    assert sorted({line["attempt"] for line in lines}) == [0, 1, 2, 3, 4]
    for key in ("loss", "grad_norm", "reward_mean"):
        assert [line[key] for line in lines] == pytest.approx(
            [line[key] for line in undisturbed], rel=1e-4, abs=1e-7
        )
    assert len({line["loss"] for line in lines}) > 30, "a run whose losses are all alike would show nothing"


def test_no_trajectory_is_consumed_twice_and_groups_are_whole(saga: Job) -> None:
    for check in audit(saga.run).checks:
        assert not check.problems, check


def test_signal_and_preemption_stop_in_good_order_with_a_checkpoint(saga: Job) -> None:
    first, *_, preempted = saga.events("requeued")
    assert "USR1" in first["message"] or "asked to stop" in first["message"]
    assert preempted["job"] == saga.id
    starts = saga.events("attempt starts")
    for stopped in (0, 2):
        end = json.loads((saga.run / "logs" / str(stopped) / "end.json").read_text())
        # Not the last periodic checkpoint, but the very step after which it stopped.
        assert end["state"] == "interrupted" and starts[stopped + 1]["step"] == end["step"]


def test_a_killed_node_is_named_and_the_next_attempt_starts_within_a_minute_in_the_same_job(
    saga: Job,
) -> None:
    lost, started = saga.events("node lost")[-1], saga.events("attempt starts")[-1]
    failed = saga.events("attempt failed")[-1]
    assert lost["host"] == "h20-2" and "h20-2" not in started["nodes"]
    assert "h20-2" in failed["message"]
    assert len(saga.events("job starts")) == 4, "the node's loss did not cost the allocation"


def test_each_rank_is_where_it_should_be_and_sees_its_own_gpus_only(saga: Job) -> None:
    logs = {path.stem: path.read_text() for path in (saga.run / "logs" / "0").glob("*-?.log")}
    where = {name: re.search(r"on (\S+): process", text)[1] for name, text in logs.items()}  # type: ignore[index]
    assert where["trainer-0"] == "h100-1"
    assert {where["generate-1"], where["generate-2"]} == {"h20-1", "h20-2"}
    assert where["env-3"] == where["env-4"] and where["env-3"].startswith("cpu-")
    seen = {name: re.search(r"sees GPUs (.*)", text)[1] for name, text in logs.items()}  # type: ignore[index]
    assert seen["env-3"] == seen["env-4"] == "none"
    assert all(
        len(seen[name].split(", ")) == 1 and seen[name] != "none" for name in logs if "env" not in name
    )


def test_nothing_of_a_run_is_left_on_any_node(saga: Job, testbed: Testbed) -> None:
    for node in ("h100-1", "h20-1", "cpu-1", "cpu-2"):
        listing = testbed.run("srun", "--partition=low", f"--nodelist={node}", "ls", "/tmp", "/dev/shm")
        assert listing.returncode == 0, listing.stderr
        assert "rollart-" not in listing.stdout, node
        assert "prte" not in listing.stdout, node


def test_two_jobs_on_the_same_nodes_do_not_disturb_each_other(
    testbed: Testbed, here: Path, quickstart_model: str, undisturbed: list[dict[str, Any]]
) -> None:
    config = small_config(quickstart_model)
    config["run"]["steps"] = 12
    conf = write(config, here / "twins.yaml")
    twins = [submit(testbed, conf, here / name) for name in ("one", "other")]
    for job in twins:
        job.finish()
    nodes = [job.events("job starts")[0]["nodes"] for job in twins]
    assert nodes[0]["trainer"] == nodes[1]["trainer"] and nodes[0]["generate"] == nodes[1]["generate"]
    times = [(job.events("attempt starts")[0]["t"], job.events("done")[0]["t"]) for job in twins]
    assert times[0][0] < times[1][1] and times[1][0] < times[0][1], "they did run at the same time"
    for job in twins:
        assert losses(job.metrics()) == pytest.approx(losses(undisturbed[:12]), rel=1e-4, abs=1e-7)


def test_a_job_without_enough_good_attempts_fails_with_one_clear_message(
    testbed: Testbed, here: Path, quickstart_model: str
) -> None:
    config = small_config(quickstart_model)
    config["tasks"][0]["env"] = "tests.slurm.lifecycle:Deadly"
    config["tasks"][0]["args"] = {}
    config["launch"]["restart"] = {"attempts": 1, "backoff_s": 1}
    job = submit(testbed, write(config, here / "deadly.yaml"), here / "deadly")
    message = job.wait_failed()
    assert "2 attempts in a row failed" in message and "launch.restart.attempts: 1" in message
    assert job.status()["state"] == "failed" and job.status()["message"] == message
    status = testbed.run(sys.executable, "-m", "hpc_rollart", "status", str(job.run))
    assert status.returncode == 3, status.stdout


def test_a_node_that_hangs_is_named_and_left_behind(
    testbed: Testbed, here: Path, quickstart_model: str, undisturbed: list[dict[str, Any]]
) -> None:
    config = small_config(quickstart_model)
    config["run"]["steps"] = 20
    config["launch"]["heartbeat_s"] = 6
    job = submit(testbed, write(config, here / "hangs.yaml"), here / "hangs")
    job.wait_steps(4)
    testbed.node("pause", "h20-2")
    try:
        job.wait(lambda: len(job.events("attempt starts")) == 2, "the attempt without the node")
        job.finish()
    finally:
        testbed.node("resume", "h20-2")
    assert "on h20-2" in job.events("attempt failed")[0]["message"]
    assert "launch.heartbeat_s" in job.events("attempt failed")[0]["message"]
    assert job.events("node lost")[0]["host"] == "h20-2"
    assert losses(job.metrics()) == pytest.approx(losses(undisturbed[:20]), rel=1e-4, abs=1e-7)


def states(job: Job) -> str:
    """What Slurm says of the job's components."""
    return job.testbed.run("squeue", "-h", "-j", job.id, "-o", "%T").stdout


def test_a_node_that_slurm_does_not_let_go_of_costs_the_job_and_not_the_run(
    testbed: Testbed, here: Path, quickstart_model: str, undisturbed: list[dict[str, Any]]
) -> None:
    """First the first node of a component, then the supervisor's own."""
    config = small_config(quickstart_model)
    config["run"]["steps"] = 40
    job = submit(testbed, write(config, here / "first.yaml"), here / "first")
    for number, (steps, node) in enumerate([(6, "h20-1"), (16, "h100-1")]):
        job.wait_steps(steps, attempt=number)
        testbed.node("kill", node)
        try:
            job.wait(lambda number=number: len(job.events("replaced")) > number, f"what follows {node}", 180)  # type: ignore[misc]
            # A node that came back while its job still ran would break that apart (docs/decisions.md).
            job.wait(lambda: "RUNNING" not in states(job), f"the end of job {job.id}", 60)
        finally:
            testbed.node("start", node)
        assert node in job.events("replaced")[number]["message"]
        job.id = str(job.events("replaced")[number]["by"])
    job.finish()
    assert [event["restarts"] for event in job.events("job starts")] == [0, 0, 0]
    assert [line["step"] for line in job.metrics()] == list(range(40))
    assert losses(job.metrics()) == pytest.approx(losses(undisturbed[:40]), rel=1e-4, abs=1e-7)


def test_srun_starts_the_same_world(
    testbed: Testbed, here: Path, quickstart_model: str, undisturbed: list[dict[str, Any]]
) -> None:
    config = small_config(quickstart_model)
    config["run"]["steps"] = 6
    config["launch"]["launcher"] = "srun"
    # In the order in which Slurm sorts the nodes' names, without which Slurm 22.05 cannot start it.
    config["components"] = {name: config["components"][name] for name in ("env", "generate", "trainer")}
    job = submit(testbed, write(config, here / "srun.yaml"), here / "srun")
    job.finish()
    assert losses(job.metrics()) == pytest.approx(losses(undisturbed[:6]), rel=1e-4, abs=1e-7)


def test_srun_is_refused_where_this_slurm_would_confuse_the_ranks(
    testbed: Testbed, here: Path, quickstart_model: str
) -> None:
    config = small_config(quickstart_model)
    config["launch"]["launcher"] = "srun"
    job = submit(testbed, write(config, here / "refused.yaml"), here / "refused")
    message = job.wait_failed()
    assert "not in its own order of names" in message and "launch.launcher: mpirun" in message
