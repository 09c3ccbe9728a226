"""Finds and ends every process of a run, wherever it hangs in the process tree."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil

MARKER = "ROLLART_RUN_ID"
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent dies, even of SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def of_run(run_id: str) -> list[psutil.Process]:
    """Return the living processes of run `run_id`, but for this one and its ancestors.

    A process is known by the marker in its environment, which it inherits even when its parent is gone.
    """
    wanted = f"{MARKER}={run_id}".encode()
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in mine:
            continue
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(process)
        except OSError:
            continue  # it ended, or is another user's
    return found


def end_all(run_id: str, *, grace_s: float) -> int:
    """End what is left of run `run_id`: SIGTERM, `grace_s` seconds, SIGKILL. Returns how many there were."""
    left = of_run(run_id)
    count = len(left)
    _signal(left, kill=False)
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        _, left = psutil.wait_procs(left, timeout=min(0.2, grace_s))
    # Looked up anew: a process that was just being forked is in no earlier list.
    for _ in range(10):
        left = of_run(run_id)
        if not left:
            break
        _signal(left, kill=True)
        psutil.wait_procs(left, timeout=1.0)
    return count


def _signal(processes: Iterable[psutil.Process], *, kill: bool) -> None:
    for process in processes:
        try:
            if kill:
                process.kill()
            else:
                process.terminate()
        except psutil.NoSuchProcess:
            continue
