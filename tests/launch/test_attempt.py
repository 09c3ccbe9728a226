"""Where the next attempt of a run begins, and that nobody takes an old state for the new attempt's."""

import json
from pathlib import Path

import pytest

from hpc_rollart.config import RunConfig
from hpc_rollart.errors import UserError
from hpc_rollart.launch.attempt import Attempt, next_attempt
from hpc_rollart.launch.view import RunView
from tests.launch.conftest import make_config


def config_of(tmp_path: Path, resume: str = "auto") -> RunConfig:
    config = make_config(tmp_path)
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": resume})})


def save(directory: Path, step: int, *, ledger: bool = True) -> Path:
    """Write what looks like a whole checkpoint."""
    folder = directory / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for name in ("model.safetensors", "optimizer.safetensors"):
        (folder / name).write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "trainer.json").write_text(json.dumps({"step": step, "updates": step}))
    if ledger:
        (folder / "ledger.json").write_text(json.dumps({"ledger": {"step": step}}))
    (directory / "LATEST").write_text(folder.name + "\n")
    return folder


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_begins_with_the_model_and_goes_on_from_its_own_newest_checkpoint(
    tmp_path: Path, resume: str
) -> None:
    config, run = config_of(tmp_path, resume), tmp_path / "run"
    first = next_attempt(run, config)
    assert first == Attempt(0)
    first.write(run)
    assert next_attempt(run, config, {"env": 1}) == Attempt(1, nodes={"env": 1})
    save(run / "checkpoints", 3)
    newest = save(run / "checkpoints", 7)
    assert next_attempt(run, config) == Attempt(1, 7, str(newest))


def test_auto_takes_a_checkpoint_that_is_there_before_the_first_attempt_and_never_does_not(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    own = save(run / "checkpoints", 3)
    assert next_attempt(run, config_of(tmp_path)) == Attempt(0, 3, str(own))
    assert next_attempt(run, config_of(tmp_path, "never")) == Attempt(0)


def test_a_checkpoint_of_another_run_is_step_0_until_the_run_has_its_own(tmp_path: Path) -> None:
    run, other = tmp_path / "run", save(tmp_path / "other", 40, ledger=False)
    config = config_of(tmp_path, str(other))
    assert next_attempt(run, config) == Attempt(0, 0, str(other))
    Attempt(0).write(run)
    assert next_attempt(run, config) == Attempt(1, 0, str(other))
    own = save(run / "checkpoints", 2)
    assert next_attempt(run, config) == Attempt(1, 2, str(own))


def test_a_checkpoint_that_cannot_be_gone_on_from_is_one_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"checkpoint\.resume: .*none is no directory"):
        next_attempt(run, config_of(tmp_path, str(tmp_path / "none")))
    own = save(run / "checkpoints", 3)
    (own / "ledger.json").unlink()
    with pytest.raises(UserError, match=r"has no ledger\.json"):
        next_attempt(run, config_of(tmp_path))
    (run / "checkpoints" / "LATEST").write_text("step-000009\n")
    with pytest.raises(UserError, match="step-000009 is no directory"):
        next_attempt(run, config_of(tmp_path))


def test_behind_a_damaged_checkpoint_the_whole_one_before_it_is_taken_and_this_is_said(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    before, torn, newest = (save(run / "checkpoints", step) for step in (3, 5, 7))
    (torn / "ledger.json").unlink()
    (newest / "optimizer.safetensors").write_bytes(b"torn")
    attempt = next_attempt(run, config_of(tmp_path))
    assert (attempt.step, attempt.checkpoint) == (3, str(before))
    assert "step-000007/optimizer.safetensors is damaged" in attempt.passed_over
    attempt.write(run)
    assert Attempt.read(run, 0) == attempt


def test_a_new_attempt_is_starting_whatever_became_of_the_one_before(tmp_path: Path) -> None:
    Attempt(0).write(tmp_path)
    assert not (tmp_path / "status.json").exists()
    old = {"state": "failed", "step": 5, "steps": 9, "t": 1.0, "t_start": 0.5, "message": "out of luck"}
    (tmp_path / "status.json").write_text(json.dumps(old))
    Attempt(1, step=4).write(tmp_path)
    view = RunView(tmp_path)
    view.refresh()
    assert (view.state, view.message, view.final) == ("starting", "", False)
    assert view.status["step"] == 4 and (view.silent_s() or 0.0) < 60


def test_an_attempt_that_cannot_be_written_or_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("[]")
    with pytest.raises(UserError, match=r"status\.json: not a run's status"):
        Attempt(0).write(tmp_path)
    (tmp_path / "status.json").unlink()
    Attempt(0).write(tmp_path)  # what was damaged before has used up no number
    with pytest.raises(UserError, match="another program has just begun"):
        Attempt(0).write(tmp_path)
    assert Attempt.read(tmp_path, 0) == Attempt(0)
    (tmp_path / "logs" / "0" / "attempt.json").write_text('{"number": "0"}')
    with pytest.raises(UserError, match=r"attempt\.json: not an attempt of a run"):
        Attempt.read(tmp_path, 0)
    with pytest.raises(UserError, match=r"attempt\.json: cannot be read: No such file"):
        Attempt.read(tmp_path, 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "logs").write_text("")
    with pytest.raises(UserError, match="logs/0: cannot be written: Not a directory"):
        Attempt(0).write(tmp_path / "other")


def test_a_view_follows_metrics_that_a_new_attempt_cut_back(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)))
    view = RunView(tmp_path)
    view.refresh()
    aside = tmp_path / "aside"
    aside.write_text('{"step": 0}\n')
    aside.replace(metrics)
    view.refresh()
    assert [line["step"] for line in view.steps] == [0]
    with metrics.open("a") as file:
        file.write('{"step": 1, "more": "than there was before"}\n' * 1)
    view.refresh()
    assert [line["step"] for line in view.steps] == [0, 1]
