"""The run's present state in one small file, replaced whole, for whoever looks at it."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from hpc_rollart.errors import UserError

STATUS_FILE = "status.json"
# What NFS says of a file while another node replaces it: there is no news.
NO_NEWS = (errno.ESTALE, errno.EIO)


class _Task(Struct):
    reward: float | UnsetType | None = UNSET
    trajectories: int | UnsetType = UNSET
    failed: int | UnsetType = UNSET


class _Staleness(Struct):
    mean: float | UnsetType = UNSET
    max: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.mean is UNSET) != (self.max is UNSET):
            raise ValueError("`mean` and `max` come together")


class _Status(Struct):
    """What readers may rely on: every key may be missing, and none has another type."""

    state: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    attempt: int | UnsetType = UNSET
    step: int | UnsetType = UNSET
    steps: int | UnsetType = UNSET
    t: float | UnsetType = UNSET
    t_start: float | UnsetType = UNSET
    eta_s: float | UnsetType | None = UNSET
    version: int | UnsetType = UNSET
    tasks: dict[str, _Task] | UnsetType = UNSET
    tokens_per_s: float | UnsetType | None = UNSET
    staleness: _Staleness | UnsetType = UNSET
    in_flight: int | UnsetType = UNSET
    groups: dict[str, int] | UnsetType = UNSET
    waits: dict[str, float | None] | UnsetType = UNSET


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
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in NO_NEWS:
            return None
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        status: dict[str, Any] = msgspec.json.decode(text)
        msgspec.convert(status, _Status)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a run's status ({error}); remove it to read on") from None
    return status
