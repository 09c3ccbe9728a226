"""How this package opens HDF5 files, so that every mode, lock and error is decided in one place.

Single writer, multiple readers (SWMR): what was flushed survives ``kill -9`` and is readable while the
run goes on. HDF5's own file locks are left off: one writer per file is guaranteed by creating each
file exclusively, SWMR readers need no lock, and many parallel file systems have none to give.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin

FILTERS: dict[str, Mapping[str, Any]] = {
    "bitshuffle-lz4": hdf5plugin.Bitshuffle(cname="lz4"),
    "gzip": {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    "none": {},
}
"""Dataset arguments of each ``store.filter``. ``gzip`` and ``none`` need no plugin to read."""

# SWMR needs the 1.10 file format; nothing newer, so that the tools of old distributions read it too.
LIBVER = ("v110", "v110")

_LOCK_HINT = (
    "; HDF5_USE_FILE_LOCKING is set to {!r}, which overrides this program: this file system may have no "
    "locks, export HDF5_USE_FILE_LOCKING=FALSE"
)


class StoreError(RuntimeError):
    """A shard or batch log could not be written or read; the message names the file."""


def explain(action: str, path: Path, error: Exception) -> StoreError:
    """Turn a low-level HDF5 error about `path` into one that says what to look at."""
    hint = ""
    locking = os.environ.get("HDF5_USE_FILE_LOCKING")
    if "lock" in str(error).lower() and locking not in (None, "FALSE", "0"):
        hint = _LOCK_HINT.format(locking)
    return StoreError(f"cannot {action} {path}: {error}{hint}")


def create(path: Path) -> h5py.File:
    """Create `path` for one writer, readable by its owner only.

    The caller lays out every dataset and attribute, then sets ``file.swmr_mode = True``.

    Raises
    ------
    FileExistsError
        `path` exists: somebody else is, or was, its one writer.
    StoreError
        HDF5 cannot write there.
    """
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        return h5py.File(path, "w", libver=LIBVER, locking=False)
    except OSError as error:
        raise explain("create", path, error) from error


def open_for_reading(path: Path) -> h5py.File:
    """Open `path` whether its writer still runs, closed it, or was killed.

    Raises
    ------
    StoreError
        The file is missing, or is not (yet) an HDF5 file: its writer died while creating it.
    """
    try:
        # swmr=True reads live files, and those whose writer never came to close them.
        return h5py.File(path, "r", swmr=True, libver="latest", locking=False)
    except OSError as error:
        raise explain("read", path, error) from error
