"""The trainer's side of weight sync: snapshot a version, broadcast it in the background."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hpc_rollart.messages import Publish, Received
from hpc_rollart.weights.agreement import Agreement
from hpc_rollart.weights.bucket import TRAILER_BYTES, seal
from hpc_rollart.weights.errors import TransportError, WeightSyncError
from hpc_rollart.weights.plan import Plan
from hpc_rollart.weights.transport import Messenger, Transfer, Transport

ATTEMPTS = 2
POLL_S = 0.001
"""Between two looks at the transfers: they keep moving, and the trainer's computation keeps its core."""

LOSS_NOTICE_S = 2.0
"""After a failed transfer, the longest wait for the mailbox to say which rank is gone."""


@dataclass(frozen=True, slots=True)
class PublishTiming:
    """What it took to publish one version.

    Attributes
    ----------
    version
        The version published.
    snapshot_s
        Seconds of the snapshot; the trainer cannot go on meanwhile.
    broadcast_s
        Seconds until the last receiver had it all, in the background.
    bytes
        Size of the state.
    attempts
        1, or 2 when a transfer was corrupted and repeated.
    """

    version: int
    snapshot_s: float
    broadcast_s: float
    bytes: int
    attempts: int


class Publisher:
    """Sends versions of one state to a fixed set of receivers.

    Parameters
    ----------
    transport
        Links this rank, its rank 0, with the receivers.
    mailbox
        Carries the announcements; `Received` is handled here from now on.
    receivers
        World ranks of the receivers, in the order of their transport ranks (1, 2, ...).
    plan
        How the state is cut.
    deadline_s
        Longest time for one broadcast and all its answers.
    """

    def __init__(
        self,
        transport: Transport,
        mailbox: Messenger,
        receivers: Sequence[int],
        plan: Plan,
        deadline_s: float,
    ) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._receivers = tuple(receivers)
        self._plan = plan
        self._deadline_s = deadline_s
        self._buckets = [transport.allocate(size + TRAILER_BYTES) for size in plan.bucket_sizes]
        self._version: int | None = None
        self._snapshot_s = 0.0
        self._attempt = 0
        self._answers: dict[int, Received] = {}
        self._lost: set[int] = set()
        self._broadcasting = False
        self._agreement = Agreement(transport, plan)
        mailbox.on(Received, self._received)
        mailbox.on_lost(self._lost.add)

    def snapshot(self, state: Mapping[str, torch.Tensor], version: int) -> float:
        """Copy a state aside, so that training may change it at once.

        Makes no call to the transport, so it may run in any thread.

        Returns
        -------
        float
            Seconds taken.

        Raises
        ------
        WeightSyncError
            The version before is still being published.
        ValueError
            The state is not the planned one.
        """
        if self._broadcasting:
            raise WeightSyncError(f"version {self._version} is still being published: wait for it first")
        start = time.perf_counter()
        self._version = None  # not to be published while half copied
        self._plan.pack(state, self._buckets)
        for index, bucket in enumerate(self._buckets):
            seal(bucket, version, index)
        self._version = version
        self._snapshot_s = time.perf_counter() - start
        return self._snapshot_s

    async def publish(self) -> PublishTiming:
        """Send the snapshot to every receiver and wait until all have it whole.

        A receiver whose copy failed its checksum makes the broadcast be repeated, once. No receiver ever
        serves a version it does not have whole.

        Raises
        ------
        WeightSyncError
            A receiver missed the deadline, was lost, or got it corrupted twice; the text names it.
        """
        version = self._version
        if version is None:
            raise WeightSyncError("there is no snapshot to publish")
        if self._broadcasting:
            raise WeightSyncError(f"version {version} is being published already")
        self._broadcasting = True
        start = time.perf_counter()
        await self._agree()
        faults: list[str] = []
        for attempt in range(ATTEMPTS):
            faults = await self._broadcast(version, attempt)
            if not faults:
                self._broadcasting = False
                seconds = time.perf_counter() - start
                return PublishTiming(version, self._snapshot_s, seconds, self._plan.total_bytes, attempt + 1)
        raise WeightSyncError(f"version {version} arrived corrupted {ATTEMPTS} times: {'; '.join(faults)}")

    async def _agree(self) -> None:
        await self._wait(self._agreement.done, lambda: self._receivers, "joining the weights communicator")
        dissenters = [self._receivers[rank - 1] for rank in self._agreement.dissenters()]
        if dissenters:
            raise WeightSyncError(
                f"the model of {self._names(dissenters)} has other tensors or buckets than the trainer's"
            )

    async def _broadcast(self, version: int, attempt: int) -> list[str]:
        """One broadcast; returns a line for each receiver that got it corrupted."""
        self._answers.clear()
        self._attempt = attempt
        announcement = Publish(version=version, attempt=attempt)
        for rank in self._receivers:
            self._mailbox.send(rank, announcement)
        transfers: deque[Transfer] = deque(self._transport.broadcast(bucket) for bucket in self._buckets)

        def complete() -> bool:
            while transfers and transfers[0].done():
                transfers.popleft()
            return not transfers and not self._missing()

        await self._wait(complete, self._missing, f"receiving version {version} of the weights")
        bad = [(rank, answer.error) for rank, answer in sorted(self._answers.items()) if not answer.ok]
        return [f"{self._names([rank])}: {error}" for rank, error in bad]

    async def _wait(
        self, complete: Callable[[], bool], missing: Callable[[], Sequence[int]], what: str
    ) -> None:
        end = time.monotonic() + self._deadline_s
        failure: TransportError | None = None
        while True:
            lost = self._lost.intersection(self._receivers)
            if lost:
                raise WeightSyncError(f"{what}: {self._names(sorted(lost))} was lost") from failure
            if failure is None:
                try:
                    if complete():
                        return
                except TransportError as error:
                    # Most likely a rank died; the mailbox, which can tell which one, notices in a moment.
                    failure = error
                    end = min(end, time.monotonic() + LOSS_NOTICE_S)
            if time.monotonic() > end:
                reason = failure or f"not within {self._deadline_s:g} s"
                raise WeightSyncError(f"{what}: {self._names(missing())}: {reason}") from failure
            await asyncio.sleep(POLL_S)

    def _missing(self) -> list[int]:
        return [rank for rank in self._receivers if rank not in self._answers]

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} ({self._mailbox.name_of(rank)})" for rank in ranks)

    def _received(self, source: int, answer: Received) -> None:
        if (answer.version, answer.attempt) == (self._version, self._attempt):
            self._answers[source] = answer
