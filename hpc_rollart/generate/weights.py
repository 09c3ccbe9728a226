"""Copies a complete set of weights into a model, or changes nothing."""

from collections.abc import Mapping

import torch
from torch import nn


def copy_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor], version: int) -> None:
    """Overwrite all parameters of a model, in place and cast to their dtype.

    Parameters
    ----------
    model
        Its `state_dict` says which names and shapes there are.
    tensors
        One for every parameter, and for every buffer that should change. Where parameters are tied, one of
        their names is enough; more must agree.
    version
        For the error message.

    Raises
    ------
    ValueError
        If a name is unknown or missing, a shape differs, or tied parameters disagree; the model is then
        as it was.
    """
    by_name = model.state_dict(keep_vars=True)
    unknown = sorted(tensors.keys() - by_name.keys())
    if unknown:
        raise ValueError(f"version {version}: the model has no tensor {_listed(unknown)}")
    for name, tensor in tensors.items():
        if tensor.shape != by_name[name].shape:
            raise ValueError(
                f"version {version}: {name} has shape {tuple(tensor.shape)}, "
                f"the model's is {tuple(by_name[name].shape)}"
            )
    aliases: dict[int, list[str]] = {}
    for name, target in by_name.items():
        aliases.setdefault(id(target), []).append(name)
    chosen: list[str] = []
    missing: list[str] = []
    for names in aliases.values():
        first, *others = [name for name in names if name in tensors] or [""]
        if first:
            chosen.append(first)
        elif isinstance(by_name[names[0]], nn.Parameter):
            missing.append(names[0])
        for other in others:
            if not torch.equal(tensors[first], tensors[other]):
                raise ValueError(f"version {version}: {first} and {other} are tied but differ")
    if missing:
        raise ValueError(f"version {version}: no tensor was given for {_listed(missing)}")
    with torch.no_grad():
        for name in chosen:
            by_name[name].copy_(tensors[name])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
