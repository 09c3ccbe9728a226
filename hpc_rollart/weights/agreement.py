"""Makes sure that publisher and subscribers cut the weights the same way, before the first byte travels."""

import torch

from hpc_rollart.weights.plan import Plan
from hpc_rollart.weights.transport import Transport


class Agreement:
    """An exchange of plan digests; started at construction, on every rank of the transport."""

    def __init__(self, transport: Transport, plan: Plan) -> None:
        self._mine = transport.allocate(len(plan.digest))
        self._mine.copy_(torch.frombuffer(bytearray(plan.digest), dtype=torch.uint8))
        self._everyones = transport.allocate(transport.size * len(plan.digest))
        self._everyones = self._everyones.reshape(transport.size, -1)
        self._transfer = transport.exchange(self._mine, self._everyones)
        self._complete = False

    def done(self) -> bool:
        """Whether all digests are here."""
        self._complete = self._complete or self._transfer.done()
        return self._complete

    def dissenters(self) -> list[int]:
        """Transport ranks whose plan is not the publisher's; call it once `done`."""
        differs = (self._everyones != self._everyones[0]).any(dim=1)
        return [int(rank) for rank in differs.nonzero().flatten()]
