"""A run goes on where it was: after a stop, after kill -9 of everything, whichever rank is asked to stop."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hpc_rollart.analysis.recount import audit
from hpc_rollart.config import RunConfig
from hpc_rollart.launch import rundir
from hpc_rollart.store.reader import open_run
from tests.end_to_end import independent
from tests.end_to_end.conftest import Run, base_config, complete, start
from tests.end_to_end.resuming import complete_again, start_again
from tests.end_to_end.test_stopping import after_steps, alive, ranks

STEPS = 6
Act = Callable[["subprocess.Popen[str]", Path], None]


def exact() -> dict[str, Any]:
    """A synchronous run whose every loss is decided by the seed."""
    config = base_config()
    config["run"]["steps"] = STEPS
    config["schedule"] = {"mode": "async", "alpha": 0}
    config["engine"] = {"deterministic": True}
    graded = {"env": "tests.end_to_end.graded_env:Graded", "args": {"latency_s": 0.3}, "max_turns": 4}
    config["tasks"] = [
        graded | {"name": "words", "affinity": "compute", "sampling": {"max_tokens": 4}},
        graded | {"name": "letters", "affinity": "bandwidth", "sampling": {"max_tokens": 2}},
    ]
    config["checkpoint"] = {"every_steps": 1}
    return config


def kill_everything(process: "subprocess.Popen[str]", path: Path) -> None:
    """As when a node goes down: nobody gets to say anything."""
    tree = psutil.Process(process.pid).children(recursive=True)
    for one in [psutil.Process(process.pid), *tree]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    deadline = time.monotonic() + 30
    while alive({one.pid for one in tree}):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def interrupted(process: "subprocess.Popen[str]", path: Path, steps: int, act: Act) -> Run:
    """Wait for `steps` steps, `act`, and return how the attempt ended."""
    try:
        after_steps(process, path, steps)
        act(process, path)
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
    return Run(path, process.returncode, output)


def check(run: Run, steps: int) -> None:
    """The whole run, over all its attempts, is sound."""
    assert [line["step"] for line in run.metrics()] == list(range(steps))
    assert run.status()["state"] == "done" and run.status()["step"] == steps
    found = audit(run.path)
    assert found.problems == [], found.table()
    consumed = open_run(run.path).consumed()
    assert sorted(set(consumed["step"].tolist())) == list(range(steps))
    assert len(np.unique(consumed["trajectory"])) == len(consumed)
    table, _ = independent.rows(run.path)
    assert len(np.unique(table["trajectory"])) == len(table)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The synchronous run without an interruption."""
    run = complete(exact(), tmp_path_factory.mktemp("whole"))
    assert run.code == 0, run.output
    return run


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (lambda process, _: process.send_signal(signal.SIGTERM), 130),
        (kill_everything, -signal.SIGKILL),
    ],
    ids=["stopped", "killed"],
)
def test_an_interrupted_synchronous_run_computes_what_an_uninterrupted_one_does(
    whole: Run, tmp_path: Path, act: Act, code: int
) -> None:
    process, path = start(exact(), tmp_path)
    first = interrupted(process, path, 2, act)
    assert first.code == code, first.output
    before = first.metrics()
    again = complete_again(path)
    assert again.code == 0, again.output
    check(again, STEPS)
    metrics = again.metrics()
    attempts = [line["attempt"] for line in metrics]
    begun = attempts.index(1)
    assert begun >= 1 and attempts == [0] * begun + [1] * (STEPS - begun)
    assert metrics[:begun] == before[:begun]
    assert all(line["grad_norm"] > 0 for line in metrics)
    for line, expected in zip(metrics, whole.metrics(), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert line["reward"] == expected["reward"]
    assert made_of(again.path) == made_of(whole.path)
    counts = [run.metrics()[-1]["counts"] for run in (again, whole)]
    assert counts[0] == counts[1]


def made_of(path: Path) -> list[tuple[int, int, int]]:
    """Step, group and environment seed of everything that was trained on."""
    seeds = {int(row["trajectory"]): int(row["seed"]) for row in independent.rows(path)[0]}
    rows = open_run(path).consumed()
    return [(int(row["step"]), int(row["group"]), seeds[int(row["trajectory"])]) for row in rows]


def test_an_asynchronous_run_killed_twice_goes_on_to_its_end(tmp_path: Path) -> None:
    config = base_config()
    config["run"]["steps"] = 14
    config["schedule"] = {"alpha": 1, "redundancy": {"groups": 1, "members": 1}}
    config["checkpoint"] = {"every_steps": 3}
    process, path = start(config, tmp_path)
    first = interrupted(process, path, 5, kill_everything)
    assert first.code == -signal.SIGKILL
    second = interrupted(start_again(path), path, 9, kill_everything)
    assert second.code == -signal.SIGKILL
    last = complete_again(path)
    assert last.code == 0, last.output
    check(last, 14)
    begun = [line["attempt"] for line in last.metrics()]
    assert begun == sorted(begun) and {0, 2} <= set(begun)
    assert all(begun.index(attempt) % 3 == 0 for attempt in set(begun))
    lines = audit(path).attempts
    assert len(lines) == 3 and "killed" in lines[0] and "done" in lines[2]
    back = open_run(path).rolled_back()
    assert len(back) == 0 or any("rolled back" in line for line in lines)


@pytest.mark.parametrize(
    ("rank", "number"), [("generate-compute-1", signal.SIGUSR2), ("env-4", signal.SIGTERM)]
)
def test_a_signal_to_any_rank_stops_the_run_in_good_order(
    tmp_path: Path, rank: str, number: signal.Signals
) -> None:
    config = base_config()
    config["run"]["steps"] = 100_000

    def ask(_process: "subprocess.Popen[str]", path: Path) -> None:
        # Slurm sends it to every process of the step: the environments' workers, too, must not die of it.
        pid = ranks(path)[rank]
        for child in psutil.Process(pid).children(recursive=True):
            child.send_signal(number)
        os.kill(pid, number)

    process, path = start(config, tmp_path)
    run = interrupted(process, path, 2, ask)
    assert run.code == 130, run.output
    assert run.status()["state"] == "interrupted"
    latest = (path / "checkpoints" / "LATEST").read_text().strip()
    assert latest == f"step-{len(run.metrics()):06d}"
    assert not independent.status_counts(path)["env_failed"]
    assert audit(path).problems == []


def test_a_rank_that_is_silent_is_named_after_the_heartbeat(tmp_path: Path) -> None:
    config = base_config()
    config["run"]["steps"] = 100_000
    config["launch"] = {"heartbeat_s": 4.0}
    process, path = start(config, tmp_path)
    frozen: list[int] = []

    def freeze(_process: "subprocess.Popen[str]", path: Path) -> None:
        frozen.append(ranks(path)["generate-bandwidth-2"])
        os.kill(frozen[0], signal.SIGSTOP)

    run = interrupted(process, path, 2, freeze)
    assert run.code == 3, run.output
    assert "rank 2 (generate-bandwidth" in run.output
    assert "no sign of life for 4 s (launch.heartbeat_s)" in run.output
    assert not alive(set(frozen))


def test_a_checkpoint_of_another_run_is_the_new_runs_step_0(whole: Run, tmp_path: Path) -> None:
    config = exact()
    config["run"]["steps"] = 1
    config["checkpoint"] = {"resume": str(whole.path / "checkpoints" / f"step-{STEPS - 1:06d}")}
    config["run"]["dir"] = str(tmp_path / "run")
    made = rundir.create(RunConfig.parse(config), ["hpc-rollart", "run"])
    rundir.amend_manifest(made.path, model_dir=config["model"]["path"])
    run = complete_again(made.path)
    assert run.code == 0, run.output
    check(run, 1)
    (line,) = run.metrics()
    assert (line["step"], line["version"], line["attempt"]) == (0, 0, 0)
    trainer = json.loads((run.path / "checkpoints" / "step-000001" / "trainer.json").read_text())
    assert trainer == {"step": 1, "updates": STEPS}
    # The groups are those of a first step, but another policy plays them.
    first = whole.metrics()[0]
    assert made_of(run.path) == [row for row in made_of(whole.path) if row[0] == 0]
    assert line["grad_norm"] != pytest.approx(first["grad_norm"], rel=1e-3)
