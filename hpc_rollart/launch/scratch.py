"""Node-local scratch directories that go with their launcher, or with the next one if it was killed."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hpc_rollart.errors import LaunchError
from hpc_rollart.launch import processes

# Prefer memory for MPI's shared segments: on a disk their pages would be written back.
_MEMORY = Path("/dev/shm")

_PREFIX, _LOCK = "rollart-", "owner.lock"
_NAME = re.compile(r"rollart-[a-z0-9_]{8}")  # as tempfile makes them
_TRIES = 10


def name_for(run_id: str, attempt: int) -> str:
    """Return the name that the scratch directories of an attempt have on every node of a job.

    MPI is told one path for all nodes; two runs of one user on one node have different ones.
    """
    return _PREFIX + hashlib.sha256(f"{run_id} {attempt}".encode()).hexdigest()[:8]


@contextlib.contextmanager
def held(base: Path, run_id: str, name: str | None = None) -> Iterator[tuple[Path, Path]]:
    """Make a directory under `base` and one in memory for MPI's shared segments, as `directory` does."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else base
    with directory(base, run_id, name) as scratch:
        if memory == base and name is not None:
            yield scratch, scratch
            return
        with directory(memory, run_id, name) as shared:
            yield scratch, shared


@contextlib.contextmanager
def directory(base: Path, run_id: str, name: str | None = None) -> Iterator[Path]:
    """Make a directory under `base` that only this user may enter, and remove it at the end.

    Its name is `name`, or one that nobody else has.

    While it is in use its lock is held. A launcher that dies of SIGKILL leaves its directory, but not its
    lock: so whoever makes the next one on this machine removes it, once the processes of its run are gone.

    Raises
    ------
    LaunchError
        The file system refuses.
    """
    try:
        _remove_abandoned(base)
        path, lock = _make(base, run_id, name)
    except OSError as error:
        raise LaunchError(
            f"cannot make a scratch directory under {base}: {error.strerror}; free some space there, or "
            "mount it with file locks"
        ) from error
    try:
        yield path
    finally:
        _remove(path)
        lock.close()


def _make(base: Path, run_id: str, name: str | None) -> tuple[Path, IO[str]]:
    for _ in range(_TRIES):
        if name is None:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        else:
            path = base / name
            path.mkdir(mode=0o700)
        try:
            if lock := _lock(path, "x"):
                lock.write(run_id)
                lock.flush()
                return path, lock
        except OSError:
            _remove(path)
            raise
        # Another launcher took it for abandoned in the instant before it was locked.
    raise BlockingIOError(0, f"{_TRIES} were removed at once by another program")


def _remove_abandoned(base: Path) -> None:
    """Remove what launchers of this user that are dead left under `base`."""
    for path in base.iterdir():
        with contextlib.suppress(OSError):  # it went meanwhile, or is not ours
            if not _NAME.fullmatch(path.name) or path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            if not (path / _LOCK).exists():
                path.rmdir()  # only if it is empty: its launcher died before it had the lock
            elif lock := _lock(path, "r"):
                if not processes.of_run(lock.read()):
                    _remove(path)
                lock.close()


def _remove(path: Path) -> None:
    """Remove a directory and, after all else, its lock: without that nobody would finish the work."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.name == _LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path, mode: str) -> IO[str] | None:
    """Hold the directory's lock until the file is closed; None if another does, or the directory is gone."""
    try:
        file = open(path / _LOCK, mode, encoding="utf-8")  # noqa: SIM115
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            return None
        raise
    if not (path / _LOCK).exists():
        file.close()
        return None
    return file
