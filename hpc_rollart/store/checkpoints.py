"""What is in a checkpoint folder, read without torch: which one is the newest, and whether it is whole.

Layout of ``checkpoints/``::

    step-000010/   config.json, model.safetensors, tokenizer files: any Hugging Face program loads it
                   optimizer.safetensors: `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME` for each parameter
                   trainer.json: {"step", "updates"}
                   ledger.json: what the coordinator goes on from; absent at step 0
    LATEST         one line, the name of the newest whole checkpoint
"""

import json
from pathlib import Path
from typing import Any

from hpc_rollart.errors import UserError

LATEST = "LATEST"
OPTIMIZER = "optimizer.safetensors"
TRAINER = "trainer.json"
LEDGER = "ledger.json"


def latest_checkpoint(directory: Path) -> Path | None:
    """Folder of the newest whole checkpoint in `directory`, or None."""
    pointer = directory / LATEST
    return directory / pointer.read_text().strip() if pointer.exists() else None


def steps_saved(directory: Path) -> dict[int, Path]:
    """Folders of the checkpoints in `directory` by their step, the newest first."""
    found = {int(path.name[5:]): path for path in directory.glob("step-*") if path.name[5:].isdecimal()}
    return dict(sorted(found.items(), reverse=True))


def check_checkpoint(folder: Path, *, ledger: bool) -> int:
    """Look whether a run can go on from `folder` and return its step; no tensor is read.

    Parameters
    ----------
    ledger
        Whether the run itself goes on, for which the coordinator's part is needed, too.

    Raises
    ------
    UserError
        Something is missing, torn or of another step; the text names the file.
    """
    if not (folder / TRAINER).is_file():
        what = "is no directory" if not folder.is_dir() else f"is no checkpoint: it has no {TRAINER}"
        raise UserError(f"{folder} {what}")
    trainer = _read(folder / TRAINER)
    step = trainer.get("step")
    if not isinstance(step, int) or not isinstance(trainer.get("updates"), int):
        raise UserError(f"{folder / TRAINER} is damaged: it does not say step and updates")
    weights = sorted(folder.glob("model*.safetensors"))
    for path in (folder / "config.json", *(weights or [folder / "model.safetensors"]), folder / OPTIMIZER):
        if not path.is_file():
            raise UserError(f"{folder} is no whole checkpoint: it has no {path.name}")
        if path.suffix == ".safetensors":
            _check_size(path)
    if ledger and step > 0:
        read_ledger(folder, step)
    return step


def read_ledger(folder: Path, step: int) -> dict[str, Any]:
    """Read the coordinator's part of the checkpoint of `step`.

    Raises
    ------
    UserError
        It is missing, damaged or that of another step.
    """
    path = folder / LEDGER
    if not path.is_file():
        raise UserError(
            f"{folder} has no {LEDGER}, so its run cannot go on from it; "
            "to begin another run with its weights, name it as checkpoint.resume"
        )
    found = _read(path)
    ledger = found.get("ledger")
    if not isinstance(ledger, dict) or ledger.get("step") != step:
        raise UserError(f"{path} is damaged: it holds no ledger of step {step}")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: it is no JSON object")
    return found


def _check_size(path: Path) -> None:
    """Whether a safetensors file is as long as its header says."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size - 8:
                raise ValueError("its header is cut off")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        expected = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if size != expected:
            raise ValueError(f"it has {size} bytes, not {expected}")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
