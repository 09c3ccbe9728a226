"""Going on with a run on this machine: from which attempt, and when not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hpc_rollart.config import ConfigError
from hpc_rollart.errors import LaunchError, UserError
from hpc_rollart.jobs import book
from hpc_rollart.jobs.book import JobRecord
from hpc_rollart.jobs.queue import JobState, Part, Queue
from hpc_rollart.launch import foreground, local, rundir
from hpc_rollart.launch.attempt import Attempt
from hpc_rollart.launch.world import Outcome
from tests.launch.conftest import make_config
from tests.launch.fake_rank import write_status


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of this machine that was interrupted in its first attempt."""
    config = make_config(tmp_path)
    task = config.tasks[0].model_copy(update={"env": "frozen-lake"})
    run = rundir.create(config.model_copy(update={"tasks": [task]}), ["x"])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    rundir.amend_manifest(run.path, model_dir=str(tmp_path / "model"))
    Attempt(0).write(run.path)
    write_status(run.path, state="interrupted", step=1)
    return run.path


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The worlds that would have been run."""
    called: list[tuple[Any, ...]] = []

    def run_world(config: Any, run: Any, _on_poll: Any, *, attempt: Attempt) -> Outcome:
        called.append((config, run, attempt))
        return Outcome("done")

    monkeypatch.setattr(local, "run_world", run_world)
    return called


def resume(run_dir: Path) -> Outcome:
    return foreground.resume(run_dir, Console(quiet=True), live=False)


def test_next_attempt_of_the_same_run_is_started(run_dir: Path, worlds: list[tuple[Any, ...]]) -> None:
    assert resume(run_dir).state == "done"
    ((_, run, attempt),) = worlds
    assert (run.path, attempt.number) == (run_dir, 1)
    assert run.run_id in (run_dir / "manifest.json").read_text()


def test_run_whose_job_is_queued_is_not_started_here(
    run_dir: Path, worlds: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    book.folder(run_dir).mkdir()
    book.record(run_dir, JobRecord(7, 0.0, "", "", 60.0))
    monkeypatch.setattr(Queue, "state", lambda _: JobState((Part(0, "PENDING"),)))
    with pytest.raises(UserError, match="job 7 of this run is still waiting"):
        resume(run_dir)
    assert not worlds


def test_run_that_somebody_submits_or_resumes_is_not_started_here(
    run_dir: Path, worlds: list[tuple[Any, ...]]
) -> None:
    with book.alone(run_dir), pytest.raises(UserError, match="somebody else submits or resumes"):
        resume(run_dir)
    assert not worlds
    assert resume(run_dir).state == "done"
    assert not book.folder(run_dir).exists()


def test_others_are_kept_away_until_the_run_reports(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    def run_world(_config: Any, _run: Any, on_poll: Any, **_: Any) -> Outcome:
        for state in ("starting", "running"):
            write_status(run_dir, state=state)
            on_poll(SimpleNamespace(stopping=False))
            held.append((book.folder(run_dir) / "submitting").exists())
        return Outcome("done")

    monkeypatch.setattr(local, "run_world", run_world)
    resume(run_dir)
    assert held == [True, False]


@pytest.mark.parametrize("started", [False, True])
def test_directory_of_a_new_run_stays_once_its_ranks_were_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    def run_world(_config: Any, run: Any, _on_poll: Any, *, attempt: Attempt) -> Outcome:
        attempt.write(run.path)
        if started:
            (run.path / "logs" / "0" / "mpirun.log").touch()
        raise LaunchError("no space")

    monkeypatch.setattr(local, "run_world", run_world)
    monkeypatch.setattr(foreground, "ensure_model", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    config = make_config(tmp_path)
    with pytest.raises(LaunchError, match="no space"):
        foreground.begin(config, ["x"], Console(quiet=True), live=False)
    assert Path(config.run.dir).exists() == started


def test_run_of_several_nodes_is_not_started_here(run_dir: Path, worlds: list[tuple[Any, ...]]) -> None:
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("nodes: 1", "nodes: 2", 1))
    with pytest.raises(ConfigError, match=r"components\.env\.nodes: 2 nodes, but this is one machine"):
        resume(run_dir)
    assert not worlds


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_run_without_its_manifest_cannot_go_on(
    run_dir: Path, worlds: list[tuple[Any, ...]], text: str | None
) -> None:
    path = run_dir / "manifest.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json: (cannot be read|not a run)"):
        resume(run_dir)
    assert not worlds
