"""Ctrl-C, lost ranks and bad input: how a run ends when it does not end by itself."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end import independent
from tests.end_to_end.conftest import Run, base_config, complete, start


def long_run() -> dict[str, Any]:
    """A run that would go on for hours."""
    config = base_config()
    config["run"]["steps"] = 100_000
    return config


def after_steps(process: "subprocess.Popen[str]", path: Path, steps: int) -> None:
    """Wait until the run has done `steps` steps."""
    deadline = time.monotonic() + 180
    metrics = path / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not get going"
        time.sleep(0.2)


def ranks(path: Path) -> dict[str, int]:
    """Process id of each rank of the run in `path`, by component and rank as its log is named."""
    found = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        if "hpc_rollart.launch.rank" in line and str(path) in line:
            environment = process.environ()
            if "OMPI_COMM_WORLD_RANK" not in environment:
                continue  # mpirun itself, whose command line names what it starts
            name = f"{environment['ROLLART_COMPONENT']}-{environment['OMPI_COMM_WORLD_RANK']}"
            found[name] = process.info["pid"]
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that still run; a process that has ended and waits to be collected does not."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


def ended(path: Path, act: Callable[["subprocess.Popen[str]"], None]) -> tuple[Run, set[int]]:
    """Start a long run, `act` on it after three steps, and return how it ended and its processes' ids."""
    process, run_dir = start(long_run(), path)
    try:
        after_steps(process, run_dir, 3)
        tree = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        assert tree.issuperset(ranks(run_dir).values())
        act(process)
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
    return Run(run_dir, process.returncode, output), tree


def test_ctrl_c_stops_every_rank_and_leaves_a_whole_run_directory(tmp_path: Path) -> None:
    run, pids = ended(tmp_path, lambda process: process.send_signal(signal.SIGINT))
    assert run.code == 130
    assert run.status()["state"] == "interrupted"
    assert not alive(pids)
    table, _ = independent.rows(run.path)
    started = sorted(int(row["trajectory"]) for row in table)
    assert started == list(range(len(started)))
    assert independent.rewards_by_step(run.path).keys() >= {line["step"] for line in run.metrics()}
    assert (run.path / "checkpoints" / "LATEST").is_file()
    assert "<html" in (run.path / "report.html").read_text()


@pytest.mark.parametrize("lost", ["generate-compute-1", "env-3", "trainer-0"])
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path, lost: str) -> None:
    def kill(_process: "subprocess.Popen[str]") -> None:
        os.kill(ranks(tmp_path / "run")[lost], signal.SIGKILL)

    run, pids = ended(tmp_path, kill)
    assert run.code == 3
    component, rank = lost.rsplit("-", 1)
    # The coordinator (env-3) cannot report itself: the others say that it is gone.
    assert f"rank {rank} ({component}" in run.output or ("coordinator" in run.output and lost == "env-3")
    assert not alive(pids)
    # What was flushed before is still there, and readable.
    assert len(independent.consumed(run.path)) >= 3 * 4


def test_a_killed_launcher_leaves_no_process_behind(tmp_path: Path) -> None:
    run, pids = ended(tmp_path, lambda process: process.send_signal(signal.SIGKILL))
    assert run.code == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while left := alive(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_a_second_run_into_the_same_directory_is_refused_and_the_first_is_untouched(tmp_path: Path) -> None:
    config = base_config()
    config["run"]["steps"] = 1
    first = complete(config, tmp_path)
    assert first.code == 0, first.output
    before = (first.path / "metrics.jsonl").read_bytes()
    second = complete(config, tmp_path)
    assert second.code == 2
    assert "holds another run" in second.output and "Traceback" not in second.output
    assert (first.path / "metrics.jsonl").read_bytes() == before
