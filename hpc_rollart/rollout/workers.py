"""Worker processes of an env rank: each episode's environment runs in one, and may hang or die there alone.

>>> pool = WorkerPool(slots=32)                                             # doctest: +SKIP
>>> await pool.start()                                                      # doctest: +SKIP
>>> async with pool.lease("frozen-lake", {"size": 4}) as env:               # doctest: +SKIP
...     observation = await env.reset(seed=1, timeout_s=30.0)
...     result = await env.step("right", timeout_s=10.0)
>>> await pool.close(deadline_s=5.0)                                        # doctest: +SKIP
"""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any

from hpc_rollart.rollout.worker_server import WorkerServer
from hpc_rollart.rollout.worker_wire import (
    HEADER,
    MAX_FRAME,
    Observed,
    Raised,
    Reply,
    Request,
    Reset,
    Step,
    StepResult,
    decode_reply,
    frame,
)

__all__ = ["EnvFailure", "StepResult", "Worker", "WorkerPool"]

# Between a worker's stream closing and the server's word on how it ended.
_EXIT_NEWS_S = 1.0
# Files and sockets of a rank that are not its workers'.
_OTHER_FILES = 512


class EnvFailure(Exception):
    """An environment failed; its episode is over, no other is affected.

    Attributes
    ----------
    stop
        `reset_error`, `step_error`, `reset_timeout`, `step_timeout`, `worker_died` or `bad_observation`.
    reason
        One line: the exception, or how the worker ended ("killed by signal 9").
    """

    def __init__(self, stop: str, reason: str) -> None:
        super().__init__(f"{stop}: {reason}")
        self.stop = stop
        self.reason = reason


class Worker:
    """One worker process and the environment in it; `WorkerPool.lease` hands it out."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.pid: int | None = None
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.failed = False
        self._env: str = ""
        self._args: dict[str, Any] = {}
        self._sock = sock
        self._exchange: asyncio.Task[Reply] | None = None
        self._answer_by = 0.0

    async def reset(self, seed: int, timeout_s: float) -> str:
        """Begin an episode and return its first observation.

        The environment is made first, unless this worker already holds it; that counts towards the timeout.

        Raises
        ------
        EnvFailure
            With `stop` one of reset_error, reset_timeout, worker_died, bad_observation.
        """
        reply = await self._call(Reset(self._env, self._args, seed), timeout_s, "reset")
        assert isinstance(reply, Observed)
        return reply.observation

    async def step(self, text: str, timeout_s: float) -> StepResult:
        """Act and return what the environment made of it.

        Raises
        ------
        EnvFailure
            With `stop` one of step_error, step_timeout, worker_died, bad_observation.
        """
        reply = await self._call(Step(text), timeout_s, "step")
        assert isinstance(reply, StepResult)
        return reply

    async def _call(self, request: Request, timeout_s: float, verb: str) -> Reply:
        self._answer_by = asyncio.get_running_loop().time() + timeout_s
        # In a task, so that cancelling the episode does not lose an answer half read.
        self._exchange = asyncio.create_task(_exchange(self._sock, frame(request)))
        done, _ = await asyncio.wait({self._exchange}, timeout=timeout_s)
        if not done:
            raise self._failure(f"{verb}_timeout", f"no answer within {timeout_s:g} s")
        if self._exchange.cancelled():
            raise self._failure("worker_died", "worker pool closed")
        if isinstance(error := self._exchange.exception(), OSError):
            await asyncio.wait({self.exited}, timeout=_EXIT_NEWS_S)
            how = self.exited.result() if self.exited.done() else str(error)
            raise self._failure("worker_died", f"{how} during {verb}")
        reply = self._exchange.result()
        if isinstance(reply, Raised):
            raise self._failure(reply.stop, reply.reason)
        return reply

    def _failure(self, stop: str, reason: str) -> EnvFailure:
        self.failed = True
        return EnvFailure(stop, reason)

    # --- for the pool ------------------------------------------------------------------------------

    def assign(self, env: str, args: dict[str, Any]) -> None:
        """Say which environment the next episode needs."""
        self._env, self._args = env, args

    def holds(self, env: str, args: dict[str, Any]) -> bool:
        """Whether the environment at hand is the one an episode needs."""
        return self._env == env and self._args == args

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come (the episode was cancelled in the middle of a request)."""
        return self._exchange is not None and not self._exchange.done()

    async def settle(self) -> None:
        """Wait for the answer to come, until the request's own deadline."""
        if self._exchange is not None and self.busy:
            await asyncio.wait({self._exchange}, timeout=self._answer_by - asyncio.get_running_loop().time())

    @property
    def reusable(self) -> bool:
        """Whether the worker is idle and nothing has gone wrong in it."""
        if self.failed or self.exited.done() or self.busy:
            return False
        exchange = self._exchange
        return exchange is None or (
            exchange.exception() is None and not isinstance(exchange.result(), Raised)
        )

    def hang_up(self) -> None:
        """Close the stream; an idle worker then closes its environment and exits."""
        if self._exchange is not None and not self._exchange.done():
            # The event loop must have let go of the socket before it is closed.
            self._exchange.add_done_callback(lambda _: self._sock.close())
            self._exchange.cancel()
        else:
            self._sock.close()


class WorkerPool:
    """At most `slots` worker processes, reused from episode to episode until one fails.

    Parameters
    ----------
    slots
        How many episodes may run at once.

    Notes
    -----
    A worker whose episode was cancelled in the middle of a request is left to finish it until the
    request's deadline, and killed earlier only if another episode needs the slot.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = asyncio.Semaphore(slots)
        self._workers: dict[int, Worker] = {}
        self._idle: list[Worker] = []
        self._settling: dict[Worker, asyncio.Task[None]] = {}
        self._dying: dict[int, Worker] = {}
        self._numbers = 0
        self._server: WorkerServer | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def start(self, deadline_s: float = 60.0) -> None:
        """Start the worker server; call it before or after MPI_Init, on the thread that runs the event loop.

        Raises
        ------
        TimeoutError, RuntimeError
            The server did not come up; names the host.
        """
        async with self._starting:
            _allow_open_files(2 * self.slots + _OTHER_FILES)
            if self._server is None or not self._server.alive:
                self._server = WorkerServer(self._on_spawned, self._on_exited, self._on_lost)
                try:
                    await self._server.wait_up(deadline_s)
                except TimeoutError:
                    await self._server.end(1.0)
                    raise

    @contextlib.asynccontextmanager
    async def lease(self, env: str, args: dict[str, Any], deadline_s: float = 600.0) -> AsyncIterator[Worker]:
        """Have a worker for one episode.

        Parameters
        ----------
        env, args
            The environment, as `envs_cpu.make` takes it. It is made by the first `reset`.
        deadline_s
            How long to wait for a free slot. The coordinator admits no more episodes than there are slots,
            so this is only reached when something is wrong.

        Raises
        ------
        TimeoutError
            No slot came free; names the host.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._free.acquire()
        except TimeoutError:
            raise TimeoutError(
                f"no worker slot of {self.slots} on {socket.gethostname()} came free in {deadline_s:g} s"
            ) from None
        try:
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            if self._server is None or not self._server.alive:
                await self.start()
            worker = self._take(env, args)
            try:
                yield worker
            finally:
                self._give_back(worker)
        finally:
            self._free.release()

    async def close(self, deadline_s: float) -> None:
        """End every worker and the server, and make sure that they are gone.

        Idle workers close their environments and exit; whatever still runs after half the time is killed.

        Raises
        ------
        TimeoutError
            A process survived; names it and the host.
        """
        self._closed = True
        server, self._server = self._server, None
        if server is None:
            return
        for settling in self._settling.values():
            settling.cancel()
        for worker in self._workers.values():
            worker.hang_up()
        leaving = [worker.exited for worker in (*self._workers.values(), *self._dying.values())]
        if leaving:
            await asyncio.wait(leaving, timeout=deadline_s / 2)
        for worker in list(self._workers.values()):
            server.kill(worker.number)
        await server.end(deadline_s / 2)
        self._all_exited("worker pool closed")

    @property
    def pids(self) -> list[int]:
        """Process ids of the server and of every worker that is known to run."""
        server = [self._server.pid] if self._server and self._server.alive else []
        workers = (*self._workers.values(), *self._dying.values())
        return server + [worker.pid for worker in workers if worker.pid is not None]

    # --- workers come and go: no awaits here, so the books are always straight -----------------------

    def _take(self, env: str, args: dict[str, Any]) -> Worker:
        held = [worker for worker in self._idle if worker.holds(env, args)]
        if not held and len(self._workers) >= self.slots:
            if self._idle:
                held = self._idle[:1]
            else:
                self._discard(next(iter(self._settling)))
        if held:
            worker = held[-1]
            self._idle.remove(worker)
        else:
            assert self._server is not None
            self._numbers += 1
            worker = Worker(self._numbers, self._server.spawn(self._numbers, env))
            self._workers[worker.number] = worker
        worker.assign(env, args)
        return worker

    def _give_back(self, worker: Worker) -> None:
        if worker.reusable:
            self._idle.append(worker)
        elif worker.busy and not worker.failed and not self._closed:
            self._settling[worker] = asyncio.create_task(self._settle(worker))
        else:
            self._discard(worker)

    async def _settle(self, worker: Worker) -> None:
        await worker.settle()
        if self._settling.pop(worker, None):
            if worker.reusable:
                self._idle.append(worker)
            else:
                self._discard(worker)

    def _discard(self, worker: Worker) -> None:
        """Have a worker killed; it no longer counts, for the server obeys in order."""
        if settling := self._settling.pop(worker, None):
            settling.cancel()
        worker.hang_up()
        if self._workers.pop(worker.number, None) and not worker.exited.done() and self._server is not None:
            self._dying[worker.number] = worker
            self._server.kill(worker.number)

    # --- news from the server ------------------------------------------------------------------------

    def _on_spawned(self, number: int, pid: int) -> None:
        if worker := self._workers.get(number) or self._dying.get(number):
            worker.pid = pid

    def _on_exited(self, number: int, reason: str) -> None:
        if worker := self._workers.get(number) or self._dying.pop(number, None):
            if not worker.exited.done():
                worker.exited.set_result(reason)
            if worker in self._idle:
                self._idle.remove(worker)
                self._discard(worker)

    def _on_lost(self) -> None:
        self._all_exited("worker server died")

    def _all_exited(self, reason: str) -> None:
        for number in (*self._workers, *self._dying):
            self._on_exited(number, reason)


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit, often 1,024, which a rank with many slots would run into."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


async def _exchange(sock: socket.socket, request: bytes) -> Reply:
    """Send a request and read its reply; ConnectionError if the worker is gone."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, request)
    (size,) = HEADER.unpack(await _receive(loop, sock, HEADER.size))
    if size > MAX_FRAME:
        raise ConnectionError("wrote to a stream that is not its own")
    return decode_reply(await _receive(loop, sock, size))


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view, filled = memoryview(buffer), 0
    while filled < count:
        got = await loop.sock_recv_into(sock, view[filled:])
        if not got:
            raise ConnectionError("closed its connection")
        filled += got
    return bytes(buffer)
