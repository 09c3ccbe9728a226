"""Folders that other processes see either whole or not at all."""

import errno
import os
import shutil
from pathlib import Path


def publish_folder(aside: Path, final: Path, *, replace: bool) -> None:
    """Make a finished folder appear under its name at once, on disk, and readable as the umask allows.

    If `final` exists already it is replaced, or else left as it is and `aside` deleted: then another
    process has made the same thing meanwhile.
    """
    umask = os.umask(0)
    os.umask(umask)
    for path in aside.iterdir():
        path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner may read
        sync(path)
    sync(aside)
    if replace:
        shutil.rmtree(final, ignore_errors=True)
    try:
        aside.rename(final)
    except OSError as error:
        if replace or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(aside)
    sync(final.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
