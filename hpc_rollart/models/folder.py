"""What a model's folder must hold, told from its files alone: torch, which takes seconds, is not imported."""

import json
import os
from pathlib import Path
from typing import Any

from hpc_rollart.errors import UserError


class ModelError(UserError):
    """A model cannot be had; the message is one line and names the folder and the mend."""


def check_folder(directory: Path) -> None:
    """Check that `directory` holds a model in Hugging Face format, without reading the weights.

    Raises
    ------
    ModelError
        Naming what is missing.
    """
    if not directory.is_dir():
        raise ModelError(f"no model folder at {directory}")
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (directory / name).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(f"the model folder {directory} lacks {', '.join(missing)}")


def is_whole(directory: Path) -> bool:
    """Whether a folder that was written here has all its files, none of them cut short.

    A folder is published whole; but old files are deleted one by one where a site clears its scratch, and a
    copy may have been broken off.
    """
    try:
        check_folder(directory)
        for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
            json.loads((directory / name).read_bytes())
        shards = set(directory.glob("*.safetensors"))
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            shards |= {directory / name for name in json.loads(index.read_bytes())["weight_map"].values()}
        return all(map(_has_all_tensors, shards))
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _has_all_tensors(path: Path) -> bool:
    """Whether a file of safetensors is as long as its header says."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size:
            return False
        header: dict[str, Any] = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return bool(ends) and size == 8 + length + max(ends)
