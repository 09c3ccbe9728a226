"""Finding and signalling the processes of a testbed, always by their ids."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from slurm.testbed.settings import TestbedError

# In the environment of the daemons that live outside the nodes' namespaces; the value is the directory.
MARK = "ROLLART_TESTBED_HEAD"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def state(pid: int) -> str:
    """Return the kernel's letter for a process (``T`` is stopped), or an empty text if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def in_namespace(path: Path) -> list[int]:
    """Return the processes whose network namespace is the one that is mounted at a path.

    Zombies are in no namespace any more, so they do not count.
    """
    try:
        wanted = path.stat()
    except OSError:
        return []
    found = []
    for pid in _pids():
        try:
            here = os.stat(f"/proc/{pid}/ns/net")
        except OSError:
            continue  # gone meanwhile
        if (here.st_dev, here.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.append(pid)
    return found


def marked(directory: Path) -> list[int]:
    """Return the processes that carry the mark of the testbed in a directory."""
    wanted = f"{MARK}={directory}".encode()
    found = []
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0") and state(pid) not in ("", "Z"):
            found.append(pid)
    return found


def send(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def end(find: Callable[[], list[int]], what: str, patience_s: float = 0.0, deadline_s: float = 20.0) -> None:
    """End every process that ``find`` returns, asking again until there is none.

    Parameters
    ----------
    find
        Returns the ids; called anew each time, since what is to end may start further processes meanwhile.
    what
        What the processes are, for the message.
    patience_s
        How long they may take to leave by themselves after SIGTERM; with 0 they get SIGKILL at once.
    deadline_s
        When to give up.
    """
    start = time.monotonic()
    if patience_s:
        send(find(), signal.SIGTERM)
        while find() and time.monotonic() - start < patience_s:
            time.sleep(0.05)
    while left := find():
        if time.monotonic() - start > patience_s + deadline_s:
            raise TestbedError(
                f"{what}: processes {left} do not end; look at them with ps and run down again"
            )
        send(left, signal.SIGKILL)
        time.sleep(0.05)


def stop(find: Callable[[], list[int]], what: str, deadline_s: float = 20.0) -> int:
    """Stop every process that ``find`` returns and return how many there are."""
    start = time.monotonic()
    while moving := [pid for pid in find() if state(pid) not in ("", "T", "Z")]:
        if time.monotonic() - start > deadline_s:
            raise TestbedError(f"{what}: processes {moving} do not stop; resume the node and try again")
        send(moving, signal.SIGSTOP)
        time.sleep(0.05)
    return len(find())
