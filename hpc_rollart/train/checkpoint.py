"""Checkpoints that are either whole or not there: written aside, renamed, and only then pointed to.

Layout of `checkpoints/`::

    step-000010/   config.json, model.safetensors, tokenizer files: any Hugging Face program loads it
                   optimizer.safetensors: `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME` for each parameter
                   trainer.json: {"step", "updates"}
    LATEST         one line, the name of the newest whole checkpoint
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hpc_rollart.folders import publish_folder, sync

LATEST = "LATEST"
_OPTIMIZER = "optimizer.safetensors"
_TRAINER = "trainer.json"


def write_checkpoint(
    directory: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    optimizer: torch.optim.Optimizer,
    updates: int,
) -> Path:
    """Write `directory/step-<step, six digits>` and point `LATEST` to it.

    Whatever instant the process dies at, `LATEST` names a whole checkpoint, if it names any; what a killed
    writer left aside is removed by the next. Only writing a step again, which replaces its folder, leaves a
    moment without one.

    Returns
    -------
    Path
        The checkpoint's folder.
    """
    name = f"step-{step:06d}"
    final, aside = directory / name, directory / f".{name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    if tokenizer is not None:
        tokenizer.save_pretrained(aside)
    save_file(_flatten(optimizer, model), aside / _OPTIMIZER)
    (aside / _TRAINER).write_text(json.dumps({"step": step, "updates": updates}) + "\n")
    publish_folder(aside, final, replace=True)
    pointer = directory / f".{LATEST}.tmp"
    pointer.write_text(name + "\n")
    sync(pointer)
    pointer.replace(directory / LATEST)
    sync(directory)
    return final


def latest_checkpoint(directory: Path) -> Path | None:
    """Folder of the newest whole checkpoint in `directory`, or None."""
    pointer = directory / LATEST
    return directory / pointer.read_text().strip() if pointer.exists() else None


def read_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Restore the optimiser's moments for `model`'s parameters; returns (step, updates)."""
    tensors = load_file(checkpoint / _OPTIMIZER)
    for key, value in tensors.items():
        field, name = key.split("/", 1)
        optimizer.state[model.get_parameter(name)][field] = value
    trainer = json.loads((checkpoint / _TRAINER).read_text())
    return int(trainer["step"]), int(trainer["updates"])


def _flatten(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{field}/{name}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }
