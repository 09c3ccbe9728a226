"""Checkpoints that are either whole or not there: written aside, renamed, and only then pointed to.

`hpc_rollart.store.checkpoints` has the layout.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hpc_rollart.folders import publish_folder, sync
from hpc_rollart.store.checkpoints import LATEST, LEDGER, OPTIMIZER, TRAINER, latest_checkpoint, steps_saved


def write_checkpoint(
    directory: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    optimizer: torch.optim.Optimizer,
    updates: int,
    ledger: bytes | None = None,
) -> Path:
    """Write `directory/step-<step, six digits>` and point `LATEST` to it.

    Whatever instant the process dies at, `LATEST` names a whole checkpoint, if it names any; what a killed
    writer left aside is removed by the next. Only writing a step again, which replaces its folder, leaves a
    moment without one.

    Parameters
    ----------
    ledger
        What the coordinator goes on from, as JSON.

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
    save_file(_flatten(optimizer, model), aside / OPTIMIZER)
    (aside / TRAINER).write_text(json.dumps({"step": step, "updates": updates}) + "\n")
    if ledger is not None:
        (aside / LEDGER).write_bytes(ledger)
    publish_folder(aside, final, replace=True)
    pointer = directory / f".{LATEST}.tmp"
    pointer.write_text(name + "\n")
    sync(pointer)
    pointer.replace(directory / LATEST)
    sync(directory)
    return final


def remove_old(directory: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints; to be called when the newest is whole and pointed to.

    Later steps than that are of a run that went back behind a damaged checkpoint, and go too. A folder is
    renamed before it is removed, so that no name that looks like a checkpoint is ever half there.
    """
    newest = latest_checkpoint(directory)
    for left in directory.glob(".step-*.old"):  # a removal that was killed
        shutil.rmtree(left, ignore_errors=True)
    saved = list(steps_saved(directory).values())
    first = saved.index(newest) if newest in saved else 0
    for folder in saved[:first] + saved[first + keep :]:
        aside = directory / f".{folder.name}.old"
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def read_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Restore the optimiser's moments for `model`'s parameters; returns (step, updates)."""
    tensors = load_file(checkpoint / OPTIMIZER)
    for key, value in tensors.items():
        field, name = key.split("/", 1)
        optimizer.state[model.get_parameter(name)][field] = value
    trainer = json.loads((checkpoint / TRAINER).read_text())
    return int(trainer["step"]), int(trainer["updates"])


def _flatten(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{field}/{name}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }
