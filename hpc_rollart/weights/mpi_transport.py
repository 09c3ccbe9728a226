"""Moves weights through host memory by non-blocking MPI broadcasts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpc_rollart.weights.errors import TransportError

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(slots=True)
class MpiTransfer:
    """One pending MPI operation and the buffers it works on."""

    request: "MPI.Request"
    buffers: tuple[torch.Tensor, ...]

    def done(self) -> bool:
        """Whether the operation is complete; each call lets MPI move it on."""
        from mpi4py import MPI

        try:
            return self.request.Test()
        except MPI.Exception as error:
            raise TransportError(error.Get_error_string()) from error


class MpiTransport:
    """Transport over a communicator whose rank 0 is the publisher.

    Parameters
    ----------
    comm
        A communicator of its own, e.g. `World.weights_comm`.
    """

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self._comm = comm

    @property
    def size(self) -> int:
        """Number of ranks of the communicator."""
        return self._comm.size

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def broadcast(self, buffer: torch.Tensor) -> MpiTransfer:
        """Start an `MPI_Ibcast` from rank 0."""
        return MpiTransfer(self._comm.Ibcast(buffer.numpy(), root=0), (buffer,))

    def exchange(self, mine: torch.Tensor, everyones: torch.Tensor) -> MpiTransfer:
        """Start an `MPI_Iallgather`."""
        request = self._comm.Iallgather(mine.numpy(), everyones.numpy())
        return MpiTransfer(request, (mine, everyones))
