"""The seam between weight sync and the library that moves its bytes.

A transport links one publisher, its rank 0, with all subscribers. Calls start a collective operation and
return at once; every rank makes the same calls in the same order, from the thread of its event loop.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Transfer(Protocol):
    """A collective operation under way; it moves only while `done` is called."""

    def done(self) -> bool:
        """Move it on; whether it is complete on this rank.

        Raises
        ------
        TransportError
            It cannot complete.
        """
        ...


class Transport(Protocol):
    """Non-blocking collective operations on buffers of bytes (`torch.uint8`, one-dimensional)."""

    @property
    def size(self) -> int:
        """Number of ranks: the publisher and its subscribers."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A buffer of the kind this transport is fastest with."""
        ...

    def broadcast(self, buffer: torch.Tensor) -> Transfer:
        """Copy the publisher's buffer into that of every subscriber; of the same size on all ranks."""
        ...

    def exchange(self, mine: torch.Tensor, everyones: torch.Tensor) -> Transfer:
        """Give every rank the buffer of every rank: shape (n,) in, (size, n) out."""
        ...


class Messenger(Protocol):
    """The part of a mailbox that weight sync needs; `hpc_rollart.fabric.Mailbox` is one."""

    def on(self, kind: Any, handler: Callable[[int, Any], None]) -> None:
        """Handle each message of a type with `handler(source, message)`."""
        ...

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Call `handler(rank)` once for each rank that dies."""
        ...

    def send(self, dest: int, message: Any) -> bool:
        """Hand a message over; False when the rank is lost."""
        ...

    def name_of(self, rank: int) -> str:
        """Component and host of a rank."""
        ...
