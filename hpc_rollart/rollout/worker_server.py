"""The env rank's end of the worker server: starts it, asks it for workers, hears how they ended.

The server is started with exec (Python's `subprocess` forks by vfork on Linux, so nothing of the rank's
state is copied or touched), which is safe before and after MPI_Init; the forks happen in the server.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping

from hpc_rollart.rollout.worker_wire import (
    CONTROL_BYTES,
    WORKERS_LEFT,
    Exited,
    Kill,
    Spawn,
    Spawned,
    Up,
    decode_event,
    encode,
)

_POLL_S = 0.005
# What a process must not inherit from an MPI rank: it would believe to be one, or be refused by Slurm.
_SCRUBBED = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of workers: none of MPI's or Slurm's, one thread each, no GPU."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_SCRUBBED)}
    return kept | _ONE_THREAD | {"CUDA_VISIBLE_DEVICES": ""}


class WorkerServer:
    """One running worker server.

    Parameters
    ----------
    on_spawned
        Called with a worker's number and process id once it runs.
    on_exited
        Called with a worker's number and how it ended, once it is reaped.
    on_lost
        Called with no argument if the server itself dies; its workers died with it.
    """

    def __init__(
        self,
        on_spawned: Callable[[int, int], None],
        on_exited: Callable[[int, str], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_spawned, self._on_exited, self._on_lost = on_spawned, on_exited, on_lost
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        self._up = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.alive = True
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            # A session of its own: a Ctrl-C or a signal to the rank's group is the rank's to handle.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpc_rollart.rollout.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=worker_environment(os.environ),
                start_new_session=True,
            )
        self._loop.add_reader(self._control, self._read)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    async def wait_up(self, deadline_s: float) -> None:
        """Wait until the server can fork.

        Raises
        ------
        TimeoutError, RuntimeError
            It did not come up in time, or it died; names the host.
        """
        host = socket.gethostname()
        try:
            async with asyncio.timeout(deadline_s):
                await self._up.wait()
        except TimeoutError:
            raise TimeoutError(
                f"worker server {self.pid} on {host} was not up after {deadline_s:g} s; "
                f"is {sys.prefix} on a slow file system?"
            ) from None
        if not self.alive:
            raise RuntimeError(f"worker server on {host} ended at its start; its log has the traceback")

    def spawn(self, worker: int, env: str) -> socket.socket:
        """Ask for a worker; returns this side of its stream, usable at once."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._send(encode(Spawn(worker, env)), theirs)
        return ours

    def kill(self, worker: int) -> None:
        """Have the worker and its session killed; `on_exited` follows."""
        self._send(encode(Kill(worker)), None)

    async def end(self, deadline_s: float) -> None:
        """End the server, which kills and reaps what workers are left, and reap it.

        Raises
        ------
        TimeoutError
            It, or a worker, did not end even when killed; names the host.
        """
        self._close_control()
        deadline = time.monotonic() + deadline_s
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        # A process in an uninterruptible system call, as on a dead file system, outlives SIGKILL.
        if self._process.returncode in (None, WORKERS_LEFT):
            raise TimeoutError(
                f"worker server {self.pid} on {socket.gethostname()}, or one of its workers, survived SIGKILL"
            )

    def _send(self, body: bytes, sock: socket.socket | None) -> None:
        if not self.alive:
            if sock:
                sock.close()
            return
        self._unsent.append((body, sock))
        self._flush()

    def _flush(self) -> None:
        """Send what the server takes; the rest when it reads again (it may be importing a suite)."""
        while self._unsent:
            body, sock = self._unsent[0]
            try:
                socket.send_fds(self._control, [body], [sock.fileno()] if sock else [])
            except BlockingIOError:
                self._loop.add_writer(self._control, self._flush)
                return
            except OSError:
                break  # It is dead; the reader notices.
            self._unsent.popleft()
            if sock:
                sock.close()
        self._loop.remove_writer(self._control)

    def _read(self) -> None:
        try:
            body = self._control.recv(CONTROL_BYTES)
        except BlockingIOError:
            return
        except OSError:
            body = b""
        if not body:
            self._close_control()
            self._process.kill()  # Already dead in all likelihood; this makes sure that wait() returns.
            self._process.wait(1.0)
            self._up.set()
            self._on_lost()
            return
        match decode_event(body):
            case Up():
                self._up.set()
            case Spawned(worker, pid):
                self._on_spawned(worker, pid)
            case Exited(worker, reason):
                self._on_exited(worker, reason)

    def _close_control(self) -> None:
        if self.alive:
            self.alive = False
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
            self._control.close()
            for _, sock in self._unsent:
                if sock:
                    sock.close()
            self._unsent.clear()
