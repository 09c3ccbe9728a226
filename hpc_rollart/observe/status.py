"""The run's present state in one small file, replaced whole, for whoever looks at it."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpc_rollart.errors import UserError

STATUS_FILE = "status.json"


class StatusFile:
    """Writes ``RUN/status.json``; a reader sees the old content or the new one, never a part."""

    def __init__(self, run_dir: Path) -> None:
        self._path = Path(run_dir) / STATUS_FILE
        self._aside = self._path.with_name(f".{STATUS_FILE}.{os.getpid()}")

    def write(self, status: Mapping[str, Any]) -> None:
        """Replace the file's content."""
        self._aside.write_bytes(msgspec.json.encode(status))
        os.replace(self._aside, self._path)


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """The last status written, or None when there is none yet.

    Raises
    ------
    UserError
        The file is damaged.
    """
    path = Path(run_dir) / STATUS_FILE
    try:
        status: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ESTALE, errno.EIO):  # NFS, while another node replaces it: no news
            return None
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); remove it to read on") from None
    if not isinstance(status, dict):
        raise UserError(f"{path}: not a run's status; remove it to read on")
    return status
