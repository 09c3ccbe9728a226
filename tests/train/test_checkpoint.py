"""Checkpoints: whole or absent, loadable by others, and enough to go on exactly."""

from pathlib import Path

import pytest
import torch

from hpc_rollart.errors import UserError
from hpc_rollart.models.load import load_model, load_tokenizer
from hpc_rollart.models.tiny import build_model, build_tokenizer
from hpc_rollart.store.checkpoints import LEDGER, check_checkpoint, latest_checkpoint, read_ledger
from hpc_rollart.train import checkpoint
from hpc_rollart.train.learner import AlgorithmSettings, Learner
from tests.train.test_learner import batch, policy, weights


def test_training_goes_on_bit_identically_from_a_checkpoint(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = AlgorithmSettings(learning_rate=1e-3, warmup_steps=4)
    tokenizer = build_tokenizer(["hello"])
    first = Learner(build_model(tokenizer, 64, 0), settings, tokenizer=tokenizer)
    samples = batch(policy())
    first.step(samples)
    folder = first.save(tmp_path, 1)
    assert load_tokenizer(folder).encode("hello") == tokenizer.encode("hello")
    resumed = Learner(load_model(folder, torch.float32), settings)
    assert resumed.restore(folder) == 1
    assert first.step(samples).metrics["learning_rate"] == resumed.step(samples).metrics["learning_rate"]
    assert torch.equal(weights(first), weights(resumed))


def test_latest_names_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    learner = Learner(policy(), AlgorithmSettings())
    assert latest_checkpoint(tmp_path) is None
    learner.save(tmp_path, 5)
    learner.save(tmp_path, 10)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000010"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-000005", "step-000010"]


def test_a_writer_that_dies_leaves_the_previous_checkpoint_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(policy(), AlgorithmSettings())
    learner.save(tmp_path, 1)

    def die(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", die)
        with pytest.raises(OSError, match="disk full"):
            learner.save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    assert not (tmp_path / "step-000002").exists()
    learner.save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000002"


def test_files_are_as_readable_as_the_umask_allows(tmp_path: Path) -> None:
    folder = Learner(policy(), AlgorithmSettings()).save(tmp_path, 1)
    (tmp_path / "probe").touch()
    modes = {p.stat().st_mode for p in folder.iterdir()}
    assert modes == {(tmp_path / "probe").stat().st_mode}


def saved(tmp_path: Path, step: int = 3) -> Path:
    """A whole checkpoint, of a step that was trained."""
    learner = Learner(policy(), AlgorithmSettings(learning_rate=1e-3))
    learner.step(batch(policy()))
    return learner.save(tmp_path, step, b'{"ledger": {"step": %d}}' % step)


def test_a_whole_checkpoint_tells_its_step_without_torch(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert check_checkpoint(folder, ledger=True) == 3
    assert read_ledger(folder, 3) == {"ledger": {"step": 3}}
    (folder / LEDGER).unlink()
    assert check_checkpoint(folder, ledger=False) == 3


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("trainer.json", None, "no checkpoint: it has no trainer.json"),
        ("trainer.json", b"{", "trainer.json is damaged"),
        ("trainer.json", b'{"step": "x"}', "trainer.json is damaged"),
        ("ledger.json", None, "no ledger.json"),
        ("ledger.json", b'{"ledger": {"step": 2}}', "no ledger of step 3"),
        ("model.safetensors", None, "no model.safetensors"),
        ("model.safetensors", b"", "model.safetensors is damaged"),
        ("optimizer.safetensors", b"x" * 100, "optimizer.safetensors is damaged"),
        ("optimizer.safetensors", -1, "optimizer.safetensors is damaged: it has"),
        ("config.json", None, "no config.json"),
    ],
)
def test_a_damaged_checkpoint_is_one_error_that_names_the_file(
    tmp_path: Path, name: str, damage: bytes | int | None, said: str
) -> None:
    folder = saved(tmp_path)
    if damage is None:
        (folder / name).unlink()
    elif isinstance(damage, int):
        (folder / name).write_bytes((folder / name).read_bytes()[:damage])
    else:
        (folder / name).write_bytes(damage)
    with pytest.raises(UserError, match=said) as error:
        check_checkpoint(folder, ledger=True)
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no directory"):
        check_checkpoint(tmp_path / "none", ledger=False)


def test_old_checkpoints_go_and_a_removal_that_was_killed_is_finished(tmp_path: Path) -> None:
    for step in (2, 4, 10, 12):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / "model.safetensors").touch()
    (tmp_path / ".step-000001.old").mkdir()
    checkpoint.remove_old(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000012"]
    # A run that went back behind a damaged step 12 has just saved step 11.
    (tmp_path / "step-000011").mkdir()
    (tmp_path / "LATEST").write_text("step-000011\n")
    checkpoint.remove_old(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-000011"]
