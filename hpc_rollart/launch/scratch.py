"""Node-local scratch directories that go with their launcher, or with the next one if it was killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PREFIX, _LOCK = "rollart-", "owner.lock"


@contextlib.contextmanager
def directory(base: Path) -> Iterator[Path]:
    """Make a directory under `base` that only this user may enter, and remove it at the end.

    While it is in use its lock is held. A launcher that dies of SIGKILL leaves its directory, but not its
    lock: so whoever makes the next one on this machine removes it.
    """
    _remove_abandoned(base)
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = _lock(path, "x")
        if lock is not None:
            break
        # Another launcher took it for abandoned in the instant before it was locked.
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.close()


def _remove_abandoned(base: Path) -> None:
    """Remove what launchers of this user that are dead left under `base`."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
        except OSError:
            continue  # it went meanwhile
        lock = _lock(path, "r")
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            lock.close()


def _lock(path: Path, mode: str) -> IO[str] | None:
    """Hold the directory's lock until the file is closed; None if another does, or it is gone."""
    try:
        file = open(path / _LOCK, mode, encoding="utf-8")  # noqa: SIM115
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    if not (path / _LOCK).exists():
        file.close()
        return None
    return file
