"""The worker server: a small process without MPI that forks workers, so that no MPI process ever forks.

It is started by exec with what workers need already imported, so a worker is there in milliseconds and
shares those pages. It runs no user code, has one thread, and ends when its env rank does: the control
socket then reads as closed, whatever killed the rank, and every worker is killed with its session.
"""

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from types import FrameType

from envs_cpu.registry import preload
from hpc_rollart.rollout.worker_main import serve
from hpc_rollart.rollout.worker_wire import (
    CONTROL_BYTES,
    WORKERS_LEFT,
    Exited,
    Kill,
    Spawn,
    Spawned,
    Up,
    decode_order,
    encode,
)

_PR_SET_PDEATHSIG = 1
# Aimed at the rank or at the whole job step; the rank decides what they mean.
_RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LAST_REAP_S = 2.0


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler rather than SIG_IGN, which programs that an environment starts would inherit."""


class Zygote:
    """Forks, kills and reaps workers as told on the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.pids: dict[int, int] = {}
        self.wake, self._wake_write = socket.socketpair()
        self.wake.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (*_RANK_SIGNALS, signal.SIGCHLD):
            signal.signal(number, _nothing)

    def run(self) -> None:
        """Serve until the env rank closes the control socket or dies."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(self.wake, selectors.EVENT_READ)
            # What is imported so far is never collected: a collection would copy its pages into each worker.
            gc.collect()
            gc.freeze()
            self._tell(Up(os.getpid()))
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self.wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        self.wake.recv(4096)
                    self._reap()
                if self.control in ready and not self._obey():
                    break
        self._end_all()

    def _obey(self) -> bool:
        """Carry out one order; False if there is nobody to give any."""
        body, fds, _, _ = socket.recv_fds(self.control, CONTROL_BYTES, maxfds=1)
        if not body:
            return False
        order = decode_order(body)
        if isinstance(order, Kill):
            if pid := self.pids.get(order.worker):
                _kill_session(pid)
            return True
        with contextlib.suppress(Exception):  # The worker meets it too, and tells the episode it concerns.
            preload(order.env)
        self._fork(order, socket.socket(fileno=fds[0]))
        return True

    def _fork(self, order: Spawn, sock: socket.socket) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            sock.close()
            self._tell(Exited(order.worker, f"could not be forked: {error.strerror}"))
            return
        if pid == 0:
            self._become_worker(sock, parent)
        sock.close()
        self.pids[order.worker] = pid
        self._tell(Spawned(order.worker, pid))

    def _become_worker(self, sock: socket.socket, parent: int) -> None:
        """Never returns."""
        code = 1
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                return
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self.control, self.wake, self._wake_write):
                inherited.close()
            # Short of memory, the kernel should take a worker, not the rank with everybody's trajectories.
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
                score.write("500")
            serve(sock)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # Not exit(): the server's own cleanup is not the worker's to run.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Collect every worker that has ended, and whatever it left running in its session."""
        workers = {pid: worker for worker, pid in self.pids.items()}
        while self.pids and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            # Before it is reaped, so that the id cannot be another process's by now.
            _kill_session(ended.si_pid)
            os.waitpid(ended.si_pid, 0)
            if (worker := workers.pop(ended.si_pid, None)) is not None:
                del self.pids[worker]
                code = ended.si_status
                by_signal = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self._tell(
                    Exited(worker, f"killed by signal {code}" if by_signal else f"exited with code {code}")
                )

    def _end_all(self) -> None:
        for pid in self.pids.values():
            _kill_session(pid)
        deadline = time.monotonic() + _LAST_REAP_S
        while self.pids and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)

    def _tell(self, event: Up | Spawned | Exited) -> None:
        with contextlib.suppress(OSError):  # The rank is gone; the next read ends the loop.
            self.control.send(encode(event))


def _kill_session(pid: int) -> None:
    # A worker that has not come to setsid() yet has no group of its own.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def main() -> None:
    """Run the server on the inherited socket whose number is the one argument."""
    for stream in (sys.stdout, sys.stderr):
        # So that what an environment printed is in the log even if it is killed.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    zygote = Zygote(socket.socket(fileno=int(sys.argv[1])))
    zygote.run()
    os._exit(WORKERS_LEFT if zygote.pids else 0)


if __name__ == "__main__":
    main()
