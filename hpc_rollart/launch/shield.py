"""Keeps a process of ours from taking signals that Slurm sends to all processes of a step.

MPI's daemons end their ranks a second after SIGTERM, which comes with every preemption, long before the
grace time of the job is over. They unblock all signals as they start and install handlers, so that nothing
done before can hold. What can is done from outside, once they are up: a parent may change its child's signal
mask through ptrace(2), as a debugger does. Where that is not allowed (ptrace_scope above 1) the daemons do
end, the attempt with them, and the run goes on from its last periodic checkpoint.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 17, 0x420A, 0x420B
_WALL = 0x40000000  # wait for threads too
_STOP_S = 5.0
_MASK_BYTES = 8
_POLL_S = 0.05

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def block_when_handled(pid: int, numbers: Iterable[signal.Signals], deadline_s: float) -> bool:
    """Wait until a process handles the first of the signals itself, and then block them all in it.

    Parameters
    ----------
    pid
        A child of this process, or a child's child.
    numbers
        Signals to block; the process is ready when it has a handler for the first one.
    deadline_s
        Longest wait for that.

    Returns
    -------
    bool
        Whether they are blocked in all of its threads now.
    """
    wanted = list(numbers)
    end = time.monotonic() + deadline_s
    while not _caught(pid) & _bit(wanted[0]):
        if time.monotonic() > end or not Path(f"/proc/{pid}").exists():
            return False
        time.sleep(_POLL_S)
    mask = sum(_bit(number) for number in wanted)
    done: set[int] = set()
    # A thread that was just being made is in no earlier list; from then on new ones inherit the mask.
    while left := {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()} - done:
        for thread in left:
            if not _block(thread, mask) and Path(f"/proc/{pid}/task/{thread}").exists():
                return False
        done |= left
    return True


def _bit(number: signal.Signals) -> int:
    return 1 << (number - 1)


def _caught(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.split("SigCgt:")[1].split()[0], 16)


def _block(thread: int, mask: int) -> bool:
    """Add to a thread's signal mask; it is stopped for an instant."""
    if _libc.ptrace(_SEIZE, thread, None, None):
        return False
    try:
        if _libc.ptrace(_INTERRUPT, thread, None, None):
            return False
        if not _stopped(thread):
            return False
        now = ctypes.c_uint64(0)
        if _libc.ptrace(_GETSIGMASK, thread, _MASK_BYTES, ctypes.addressof(now)):
            return False
        now.value |= mask
        return not _libc.ptrace(_SETSIGMASK, thread, _MASK_BYTES, ctypes.addressof(now))
    finally:
        _libc.ptrace(_DETACH, thread, None, None)


def _stopped(thread: int) -> bool:
    """Wait until a thread that was interrupted stands still; one that ends instead is left to its parent."""
    end = time.monotonic() + _STOP_S
    while time.monotonic() < end:
        try:
            if os.waitid(os.P_PID, thread, os.WSTOPPED | os.WNOHANG | _WALL):
                return True
        except ChildProcessError:
            return False
        time.sleep(0.001)
    return False
