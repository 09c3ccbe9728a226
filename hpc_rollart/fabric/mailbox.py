"""Carries typed messages between ranks over MPI, without blocking the event loop.

One asyncio task (`Mailbox.run`) moves all messages of a rank; between blocks of computation a rank may
also call `Mailbox.poll`. All calls must come from the thread of the event loop. Messages from one rank
are handled in the order in which it sent them, whatever their sizes. A rank that dies is reported once,
and messages among the living go on (this needs `mpirun --with-ft ulfm`).
"""

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import msgspec

from hpc_rollart.fabric.codec import Codec
from hpc_rollart.fabric.errors import DeadlineExceeded, FabricError, RankLost
from hpc_rollart.fabric.pacing import SHORTEST_NAP_S, Pace
from hpc_rollart.fabric.transfer import FRAME_TAG, Arrival, send_frame

if TYPE_CHECKING:
    from mpi4py import MPI

Message = msgspec.Struct
MessageT = TypeVar("MessageT", bound=Message)
Reply = Callable[[Message], None]
Handler = Callable[[int, MessageT], Coroutine[Any, Any, None] | None]
RequestHandler = Callable[[int, MessageT, Reply], Coroutine[Any, Any, None] | None]

MAX_FRAMES_A_PASS = 256
"""A flood of messages must not keep the other tasks of the loop from running."""

REQUEST_POLLS = 64
"""A request polls this often, some 60 us, before it leaves the waiting to `run`."""

EXPIRY_STEP_S = 0.02
"""How often the deadlines of requests are looked at."""


class _Pending(NamedTuple):
    """A request that was sent and not answered yet; `end` on the clock of `time.perf_counter`."""

    dest: int
    answer: "asyncio.Future[Message]"
    end: float
    seconds: float
    what: str


class Mailbox:
    """Messages to and from the other ranks of a communicator.

    Parameters
    ----------
    comm
        Communicator of its own: nobody else may send on it.
    message_types
        Union of the tagged `msgspec.Struct` types that may travel.
    name_of
        Gives the component and host of a rank, for error messages.
    spin_s
        After traffic the loop polls without sleeping for this long: an answer is likely near.
    idle_s
        Longest sleep between two polls of an idle rank.
    """

    def __init__(
        self,
        comm: "MPI.Intracomm",
        message_types: Any,
        name_of: Callable[[int], str] = "rank {}".format,
        spin_s: float = 0.0005,
        idle_s: float = 0.008,
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._improbe, self._any_source, self._byte = comm.Improbe, MPI.ANY_SOURCE, MPI.BYTE
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._rank = comm.rank
        self._codec = Codec(message_types)
        self._name_of = name_of
        self._pace = Pace(spin_s, idle_s)
        self._status = MPI.Status()
        self._handlers: dict[type, tuple[bool, Callable[..., Any]]] = {}
        self._on_lost: list[Callable[[int], None]] = []
        self._arrivals: dict[int, deque[Arrival]] = {}
        self._outgoing: deque[tuple[int, list[MPI.Request], Any]] = deque()
        self._local: deque[tuple[int, Message]] = deque()
        self._pending: dict[int, _Pending] = {}
        self._next_expiry = 0.0
        self._next_correlation = 1
        self._lost: dict[int, list[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    # --- what a role uses ---------------------------------------------------------------------------

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that died so far."""
        return frozenset(self._lost)

    def name_of(self, rank: int) -> str:
        """Component and host of a rank."""
        return self._name_of(rank)

    def on(self, kind: type[MessageT], handler: "Handler[MessageT]") -> None:
        """Handle every plain message of a type with `handler(source, message)`.

        A coroutine function runs as a task of its own. An exception in a handler is fatal to the rank: it
        comes out of `run`, `poll` and `failed`.
        """
        self._register(kind, handler, is_request=False)

    def on_request(self, kind: type[MessageT], handler: "RequestHandler[MessageT]") -> None:
        """Handle every request of a type with `handler(source, message, reply)`.

        `reply(message)` answers it, at once or at any later time, once.
        """
        self._register(kind, handler, is_request=True)

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Call `handler(rank)` once for each rank that dies."""
        self._on_lost.append(handler)

    def send(self, dest: int, message: Message) -> bool:
        """Hand a message over; returns at once.

        The arrays of the message must not be changed afterwards. A message to the own rank is delivered by
        the next poll, not encoded.

        Returns
        -------
        bool
            False when `dest` is lost and the message was dropped. Losses are dealt with in one place,
            `on_lost`; a send that races with one need not be.
        """
        return self._post(dest, message, 0)

    async def request(
        self, dest: int, message: Message, deadline_s: float, what: str = "an answer"
    ) -> Message:
        """Send a request and wait for its answer; `run` must be running.

        Parameters
        ----------
        dest
            Rank asked.
        message
            The request; `dest` handles its type with `on_request`.
        deadline_s
            Longest wait in seconds.
        what
            The thing waited for, for the error.

        Raises
        ------
        DeadlineExceeded
            No answer in time; the text names `what`, the rank, its component and host, and the seconds.
        RankLost
            The rank died before it answered.
        """
        if dest in self._lost:
            raise RankLost(dest, self._name_of(dest), what)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        correlation = self._next_correlation
        self._next_correlation += 1
        # A timer of the event loop would cost as much as the encoding: `run` looks at the ends instead.
        self._pending[correlation] = _Pending(
            dest, answer, time.perf_counter() + deadline_s, deadline_s, what
        )
        try:
            self._post(dest, message, correlation)
            # A peer that is awake answers sooner than the event loop comes round. Where many requests are
            # out, there is other work to do meanwhile, and each would poll on behalf of all.
            if len(self._pending) == 1:
                for _ in range(REQUEST_POLLS):
                    if self.poll() and answer.done():
                        break
            return await answer
        finally:
            del self._pending[correlation]

    async def drain(self, deadline_s: float) -> None:
        """Wait until every message handed over has left this rank.

        Raises
        ------
        DeadlineExceeded
            Some rank did not take its messages in time.
        """
        end = time.monotonic() + deadline_s
        while True:
            self.poll()
            if not self._outgoing and not self._local:
                return
            if time.monotonic() > end:
                ranks = {dest: self._name_of(dest) for dest, _, _ in self._outgoing}
                raise DeadlineExceeded("taking the messages sent to it", ranks, deadline_s)
            await asyncio.sleep(SHORTEST_NAP_S)

    async def failed(self) -> NoReturn:
        """Wait for ever, or raise what a handler raised."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def run(self) -> NoReturn:
        """Move messages until cancelled; raises what a handler raised.

        Polls without pause while messages flow, then ever more seldom: an idle rank uses a few per cent
        of a core at most.
        """
        while True:
            now = time.perf_counter()
            for _ in range(self._pace.polls(now)):
                if self.poll():
                    now = time.perf_counter()
                    self._pace.traffic(now)
                    break
            if now > self._next_expiry:
                self._expire(now)
            await self._pace.rest(now, moving=bool(self._outgoing or self._arrivals))

    def poll(self) -> int:
        """Make one pass: take what arrived, call handlers, move what is in flight.

        Returns
        -------
        int
            Number of messages handled.
        """
        if self._failure is not None:
            raise self._failure
        if self._outgoing:
            self._advance_outgoing()
        handled = self._deliver_local() if self._local else 0
        handled += self._take_frames()
        if self._arrivals:
            handled += self._advance_arrivals()
        return handled

    # --- sending ------------------------------------------------------------------------------------

    def _post(self, dest: int, message: Message, correlation: int) -> bool:
        self._pace.rouse()
        if dest == self._rank:
            self._local.append((correlation, message))
            return True
        if dest in self._lost:
            return False
        frame, apart = self._codec.encode(message, correlation)
        try:
            requests = send_frame(self._comm, dest, frame, apart)
        except self._mpi.Exception as error:
            self._note_losses(error)
            return False
        if requests:
            self._outgoing.append((dest, requests, (frame, apart)))
        return True

    def _reply(self, source: int, correlation: int, message: Message) -> None:
        self._post(source, message, -correlation)

    def _advance_outgoing(self) -> None:
        for _ in range(len(self._outgoing)):
            dest, requests, buffers = self._outgoing.popleft()
            try:
                requests = [request for request in requests if not request.Test()]
            except self._mpi.Exception as error:
                self._lost_buffers(dest, error).append((requests, buffers))
                continue
            if requests:
                self._outgoing.append((dest, requests, buffers))

    # --- receiving ----------------------------------------------------------------------------------

    def _take_frames(self) -> int:
        handled = 0
        for _ in range(MAX_FRAMES_A_PASS):
            try:
                probed = self._improbe(self._any_source, FRAME_TAG, self._status)
            except self._mpi.Exception as error:
                self._note_losses(error)
                continue
            if probed is None:
                break
            source = self._status.Get_source()
            arrival = Arrival(self._comm, source, self._status.Get_count(self._byte))
            queue = self._arrivals.get(source)
            try:
                arrival.take(probed)
                arrived = queue is None and arrival.advance()
            except self._mpi.Exception as error:
                self._lost_buffers(source, error).append(arrival)
                continue
            if arrived:
                handled += self._deliver(source, arrival)
            elif queue is None:
                self._arrivals[source] = deque((arrival,))
            else:
                queue.append(arrival)
        return handled

    def _advance_arrivals(self) -> int:
        handled = 0
        for source, queue in list(self._arrivals.items()):
            try:
                # Separate arrays are matched in the order in which their receives are posted, so a
                # frame posts its own only once the frames before it have.
                for arrival in queue:
                    arrival.advance()
                    if not arrival.posted:
                        break
            except self._mpi.Exception as error:
                self._lost_buffers(source, error).extend(queue)
                continue
            while queue and queue[0].complete:
                handled += self._deliver(source, queue.popleft())
            if not queue:
                self._arrivals.pop(source, None)
        return handled

    def _deliver(self, source: int, arrival: Arrival) -> int:
        if source in self._lost:  # it was reported as dead: nobody expects its words any more
            return 0
        message = self._codec.decode(arrival.frame, arrival.apart)
        self._dispatch(source, arrival.correlation, message)
        return 1

    def _deliver_local(self) -> int:
        count = len(self._local)
        for _ in range(count):
            correlation, message = self._local.popleft()
            self._dispatch(self._rank, correlation, message)
        return count

    def _dispatch(self, source: int, correlation: int, message: Message) -> None:
        if correlation < 0:
            pending = self._pending.get(-correlation)
            if pending is not None and not pending.answer.done():
                pending.answer.set_result(message)
            return  # an answer after its deadline is dropped
        is_request, handler = self._handlers.get(type(message), (False, None))
        if handler is None or is_request != (correlation > 0):
            kind = "request" if correlation else "message"
            text = f"no handler for the {kind} {type(message).__name__} from {self._name_of(source)}"
            self._fail(FabricError(text))
            raise FabricError(text)
        try:
            if is_request:
                outcome = handler(source, message, partial(self._reply, source, correlation))
            else:
                outcome = handler(source, message)
        except BaseException as error:
            self._fail(error)
            raise
        if outcome is not None and inspect.iscoroutine(outcome):
            task = asyncio.get_running_loop().create_task(outcome)
            self._tasks.add(task)
            task.add_done_callback(self._task_done)

    # --- failures -----------------------------------------------------------------------------------

    def _register(self, kind: type, handler: Callable[..., Any], is_request: bool) -> None:
        if kind in self._handlers:
            raise ValueError(f"{kind.__name__} has a handler already")
        self._handlers[kind] = (is_request, handler)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._failed.set()
            self._pace.rouse()

    def _expire(self, now: float) -> None:
        self._next_expiry = now + EXPIRY_STEP_S
        for dest, answer, end, seconds, what in self._pending.values():
            if now > end and not answer.done():
                answer.set_exception(DeadlineExceeded(what, {dest: self._name_of(dest)}, seconds))

    def _note_losses(self, error: "MPI.Exception") -> None:
        """Acknowledge the ranks that died, so that receives from anyone go on, and report new ones."""
        mpi = self._mpi
        if error.Get_error_class() not in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING):
            raise error
        failed = self._comm.Get_failed()
        everyone = self._comm.Get_group()
        self._comm.Ack_failed()
        dead = mpi.Group.Translate_ranks(failed, None, everyone)
        for rank in sorted(set(dead) - self._lost.keys()):
            self._lose(rank)

    def _lost_buffers(self, rank: int, error: "MPI.Exception") -> list[Any]:
        """Where to keep, for good, buffers that MPI may still refer to after `rank` was lost."""
        self._note_losses(error)
        if rank not in self._lost:
            self._lose(rank)
        return self._lost[rank]

    def _lose(self, rank: int) -> None:
        self._lost[rank] = list(self._arrivals.pop(rank, ()))
        name = self._name_of(rank)
        for dest, answer, _, _, what in self._pending.values():
            if dest == rank and not answer.done():
                answer.set_exception(RankLost(rank, name, what))
        try:
            for handler in self._on_lost:
                handler(rank)
        except BaseException as error:
            self._fail(error)
            raise
