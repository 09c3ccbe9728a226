"""Moves one frame and its separate arrays through MPI, without waiting."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hpc_rollart.fabric.codec import Codec

if TYPE_CHECKING:
    from mpi4py import MPI

FRAME_TAG = 1
ARRAY_TAG = 2

PIECE_BYTES = 1 << 30
"""Longer arrays travel in pieces: the counts of many MPI libraries are 32 bits wide."""


def send_frame(
    comm: "MPI.Intracomm", dest: int, frame: bytes, apart: list[np.ndarray]
) -> "list[MPI.Request]":
    """Start sending a frame and its arrays; the requests returned are those still in flight.

    Frame and arrays must be kept alive and unchanged until all of them are complete.
    """
    request = comm.Isend(frame, dest, FRAME_TAG)
    if not apart:  # the usual case: a small frame has left at once
        return [] if request.Test() else [request]
    requests = [request]
    for array in apart:
        requests += [comm.Isend(piece, dest, ARRAY_TAG) for piece in _pieces(_as_bytes(array))]
    return requests


class Arrival:
    """A frame on its way in, with its separate arrays.

    Attributes
    ----------
    frame
        Its bytes, whole once `posted`.
    apart
        Its arrays as uint8 buffers, whole once `complete`.
    correlation
        Known once `posted`.
    posted
        Whether the frame is here and the receives of its arrays are posted.
    complete
        Whether everything is here.
    """

    __slots__ = ("_comm", "_requests", "_source", "apart", "complete", "correlation", "frame", "posted")

    def __init__(self, comm: "MPI.Intracomm", source: int, nbytes: int) -> None:
        self._comm = comm
        self._source = source
        self.frame = bytearray(nbytes)
        self.apart: list[np.ndarray] = []
        self.correlation = 0
        self.posted = self.complete = False
        self._requests: list[MPI.Request] = []

    def take(self, probed: "MPI.Message") -> None:
        """Start receiving the frame that a matched probe found."""
        self._requests = [probed.Irecv(self.frame)]

    def advance(self) -> bool:
        """Go on as far as possible; returns `complete`.

        Must be called on the arrivals of one source in their order, up to the first not `posted`.
        """
        if self.complete:
            return True
        self._requests = [request for request in self._requests if not request.Test()]
        if self._requests:
            return False
        if not self.posted:
            self.correlation, sizes = Codec.read_head(self.frame)
            for nbytes in sizes:
                array = np.empty(nbytes, np.uint8)
                self.apart.append(array)
                for piece in _pieces(array):
                    self._requests.append(self._comm.Irecv(piece, self._source, ARRAY_TAG))
            self.posted = True
        self.complete = not self._requests
        return self.complete


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[start : start + PIECE_BYTES] for start in range(0, array.nbytes, PIECE_BYTES))
