"""A generator's side of weight sync: fill a staging copy while the engine serves the old version."""

import time
from collections import deque
from collections.abc import Mapping

import torch

from hpc_rollart.messages import Publish, Received
from hpc_rollart.weights.agreement import Agreement
from hpc_rollart.weights.bucket import TRAILER_BYTES, fault
from hpc_rollart.weights.errors import TransportError, WeightSyncError
from hpc_rollart.weights.plan import Plan
from hpc_rollart.weights.transport import Messenger, Transfer, Transport

VERIFY_S = 0.004
"""One poll checks received buckets for about this long, so that it fits between two engine steps."""


class Subscriber:
    """Receives versions of one state from the publisher.

    There are two complete states: the one that serves, which is the engine's own, and the staging copy
    here. `ready` shows the staging copy only when every byte of it arrived and every checksum matched.

    Parameters
    ----------
    transport
        Links this rank with the publisher, its rank 0.
    mailbox
        Carries the announcements; `Publish` is handled here from now on.
    publisher
        World rank of the publisher.
    plan
        How the state is cut; the publisher's must be the same.
    deadline_s
        Longest time for one broadcast.
    """

    def __init__(
        self, transport: Transport, mailbox: Messenger, publisher: int, plan: Plan, deadline_s: float
    ) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._publisher = publisher
        self._plan = plan
        self._deadline_s = deadline_s
        self._staging = [transport.allocate(size + TRAILER_BYTES) for size in plan.bucket_sizes]
        self._announced: deque[Publish] = deque()
        self._current: Publish | None = None
        self._transfers: deque[tuple[int, torch.Tensor, Transfer]] = deque()
        self._unposted: deque[tuple[int, torch.Tensor]] = deque()
        self._faults: list[str] = []
        self._end = 0.0
        self._whole: int | None = None
        self._ready: tuple[int, Mapping[str, torch.Tensor]] | None = None
        self._agreement = Agreement(transport, plan)
        mailbox.on(Publish, self._announce)

    @property
    def receiving(self) -> bool:
        """Whether a broadcast is under way or waits for `installed`: poll often."""
        return self._current is not None or bool(self._announced)

    def poll(self) -> None:
        """Move the broadcast on; cheap when there is none. Call it between engine steps and when idle.

        Raises
        ------
        WeightSyncError
            A broadcast did not end in time, or the publisher's plan is not the one here.
        """
        if self._current is None and not (self._announced and self._begin()):
            return
        assert self._current is not None
        try:
            self._take()
        except TransportError as error:
            raise WeightSyncError(f"{self._sender()}: {error}") from error
        if self._transfers:
            if time.monotonic() > self._end:
                what = f"version {self._current.version} of the weights did not arrive whole"
                raise WeightSyncError(f"{what} from {self._sender()} within {self._deadline_s:g} s")
            return
        self._finish(self._current)

    def ready(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """The version that arrived whole and waits for `installed`, and its tensors by name.

        The tensors are valid until `installed` is called: copy them into the engine.
        """
        return self._ready

    def installed(self) -> None:
        """The version of `ready` is in the engine: the staging copy may take the next one."""
        self._ready = None

    def _announce(self, source: int, announcement: Publish) -> None:
        self._announced.append(announcement)

    def _begin(self) -> bool:
        """Start the next broadcast, unless the staging copy still waits to be installed."""
        announcement = self._announced[0]
        # Another receiver got this version corrupted, this one has it: take part, and keep what is here.
        repeated = announcement.version == self._whole
        if self._ready is not None and not repeated:
            return False
        if not self._agreement.done():  # the publisher announces only after it is, so this is momentary
            return False
        if self._agreement.dissenters():
            raise WeightSyncError(
                f"the model here has other tensors or buckets than that of {self._sender()}"
            )
        self._current = self._announced.popleft()
        self._faults = []
        self._end = time.monotonic() + self._deadline_s
        if repeated:
            scratch = self._transport.allocate(max(len(bucket) for bucket in self._staging))
            targets = [scratch[: len(bucket)] for bucket in self._staging]
        else:
            targets = self._staging
        self._unposted = deque(enumerate(targets))
        self._post(1 if repeated else len(targets))
        return True

    def _post(self, count: int) -> None:
        for _ in range(min(count, len(self._unposted))):
            index, buffer = self._unposted.popleft()
            self._transfers.append((index, buffer, self._transport.broadcast(buffer)))

    def _take(self) -> None:
        """Check buckets that arrived, in order."""
        assert self._current is not None
        stop = time.perf_counter() + VERIFY_S
        while self._transfers and self._transfers[0][2].done():
            index, buffer, _ = self._transfers.popleft()
            problem = fault(buffer, self._current.version, index)
            self._post(1)
            if problem:
                self._faults.append(problem)
            if time.perf_counter() > stop:
                break

    def _finish(self, announcement: Publish) -> None:
        self._current = None
        version = announcement.version
        repeated = version == self._whole
        if not repeated and not self._faults:
            self._whole = version
            self._ready = (version, self._plan.unpack(self._staging))
        ok = repeated or not self._faults
        error = "" if ok else "; ".join(self._faults)
        answer = Received(version=version, attempt=announcement.attempt, ok=ok, error=error)
        self._mailbox.send(self._publisher, answer)

    def _sender(self) -> str:
        return f"rank {self._publisher} ({self._mailbox.name_of(self._publisher)})"
