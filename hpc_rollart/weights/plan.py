"""Packs tensors into buckets of one size, by a plan that both sides derive on their own.

The tensors, in order of their names, are laid end to end in one long stream of bytes, each aligned, and
the stream is cut into buckets. A tensor may lie across buckets, so a bucket is as large as the transport
likes it, whatever the model.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes, so a view of a bucket suits any dtype."""

MAX_BUCKET_BYTES = 1 << 30
"""MPI counts of 32 bits hold no more."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in the stream.

    Attributes
    ----------
    name, shape, dtype
        What it is.
    start, nbytes
        Its place in the stream, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How one state is cut into buckets.

    Attributes
    ----------
    slots
        The tensors in the order of the stream.
    bounds
        Bucket i holds the bytes `bounds[i]` to `bounds[i + 1]` of the stream.
    digest
        SHA-256 of all that makes the plan (32 bytes); equal digests mean equal plans.
    """

    slots: tuple[Slot, ...]
    bounds: tuple[int, ...]
    digest: bytes

    @property
    def total_bytes(self) -> int:
        """Length of the stream."""
        return self.bounds[-1]

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """Bytes of each bucket: all the same but for the last, which is what is left."""
        return tuple(end - start for start, end in pairwise(self.bounds))

    def pack(self, state: Mapping[str, torch.Tensor], buckets: Sequence[torch.Tensor]) -> None:
        """Copy every tensor into the buckets.

        Parameters
        ----------
        state
            Tensors by name; more than the plan has are ignored.
        buckets
            uint8 buffers, each at least as long as its entry in `bucket_sizes`.

        Raises
        ------
        ValueError
            A tensor is missing, or its shape or dtype is not the planned one.
        """
        for slot in self.slots:
            tensor = state.get(slot.name)
            if tensor is None or tensor.shape != slot.shape or tensor.dtype != slot.dtype:
                found = "is missing" if tensor is None else f"is {tuple(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"{slot.name} {found}, the weight plan has {slot.shape} {slot.dtype}")
            source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            done = 0
            for part in self._parts(slot, buckets):
                part.copy_(source[done : done + part.numel()])
                done += part.numel()

    def unpack(self, buckets: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of full buckets: views where a tensor lies in one bucket, else copies."""
        state = {}
        for slot in self.slots:
            parts = self._parts(slot, buckets)
            flat = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
            state[slot.name] = flat.view(slot.dtype).reshape(slot.shape)
        return state

    def _parts(self, slot: Slot, buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The pieces of the buckets that hold a tensor, in order."""
        parts = []
        position, end = slot.start, slot.start + slot.nbytes
        while position < end:
            index = position // self.bounds[1]
            start, stop = position - self.bounds[index], min(end, self.bounds[index + 1]) - self.bounds[index]
            parts.append(buckets[index][start:stop])
            position = self.bounds[index] + stop
        return parts


def describe(state: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of each tensor of a state, as `make_plan` takes them."""
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]


def make_plan(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], bucket_bytes: int) -> Plan:
    """Derive the plan; it depends on nothing but the arguments, not even on the order of the tensors.

    Parameters
    ----------
    tensors
        Name, shape and dtype of each parameter and buffer.
    bucket_bytes
        Size of a bucket; a positive multiple of `ALIGNMENT`.

    Raises
    ------
    ValueError
        The bucket size cannot be used, a name comes twice, or there is no tensor.
    """
    if not 0 < bucket_bytes <= MAX_BUCKET_BYTES or bucket_bytes % ALIGNMENT:
        limits = f"a multiple of {ALIGNMENT}, at most {MAX_BUCKET_BYTES}"
        raise ValueError(f"a bucket of {bucket_bytes} bytes cannot be used: it must be {limits}")
    slots: list[Slot] = []
    position = 0
    for name, shape, dtype in sorted(tensors, key=lambda tensor: tensor[0]):
        if slots and slots[-1].name == name:
            raise ValueError(f"the tensor {name} comes twice")
        nbytes = prod(shape) * dtype.itemsize
        slots.append(Slot(name, tuple(shape), dtype, position, nbytes))
        position += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if not slots:
        raise ValueError("there is no tensor to publish")
    total = max(position, ALIGNMENT)
    bounds = (*range(0, total, bucket_bytes), total)
    facts = [bucket_bytes, *([slot.name, slot.shape, str(slot.dtype)] for slot in slots)]
    digest = hashlib.sha256(json.dumps(facts).encode()).digest()
    return Plan(tuple(slots), bounds, digest)
