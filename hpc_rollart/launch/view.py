"""What a run says of itself in its directory, read while it runs: status.json, metrics, failures."""

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hpc_rollart.errors import UserError
from hpc_rollart.observe.status import NO_NEWS, StatusFile, read_status
from hpc_rollart.observe.steps import METRICS_FILE, read_step

FINAL_STATES = ("done", "interrupted", "failed")


class _Failure(msgspec.Struct):
    component: str
    rank: int
    host: str
    error: str


@dataclass
class RunView:
    """A run directory as far as it was read; `refresh` reads what is new.

    Attributes
    ----------
    status
        Content of status.json; empty before the coordinator is up.
    steps
        Lines of metrics.jsonl so far.
    """

    path: Path
    status: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0
    _inode: int = 0
    _lines: int = 0

    def refresh(self) -> None:
        """Read what is new; a file that is not there yet, or a line half written, is left for later.

        Raises
        ------
        UserError
            A file is damaged, or cannot be read.
        """
        self.status = read_status(self.path) or self.status
        metrics = self.path / METRICS_FILE
        try:
            with metrics.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    # A new attempt has replaced it by one without the steps that it does anew.
                    self._inode, self._offset, self._lines, self.steps = found.st_ino, 0, 0, []
                file.seek(self._offset)
                block = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in NO_NEWS:
                return
            raise UserError(f"{metrics}: cannot be read: {error.strerror}") from None
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._lines += 1
            self.steps.append(read_step(metrics, self._lines, line))

    @property
    def state(self) -> str:
        """State in status.json, or nothing before there is one."""
        return str(self.status.get("state", ""))

    @property
    def message(self) -> str:
        """The coordinator's word."""
        return str(self.status.get("message", ""))

    @property
    def failed_message(self) -> str:
        """The coordinator's word if it says that the run failed."""
        return self.message if self.state == "failed" else ""

    @property
    def final(self) -> bool:
        """Whether the run has ended."""
        return self.state in FINAL_STATES

    def silent_s(self) -> float | None:
        """Return the seconds since the coordinator wrote status.json, or None before it did."""
        return time.time() - self.status["t"] if "t" in self.status and not self.final else None

    def unheard(self, limit_s: float) -> str:
        """Return that the run has not reported for longer than `limit_s`, or nothing."""
        if (self.silent_s() or 0.0) <= limit_s:
            return ""
        return f"{self.path}: the run has not reported for {limit_s:g} s; its launcher was killed?"

    def rewards(self, task: str) -> list[float]:
        """Return the task's mean reward at each step that had it."""
        return [line["reward"][task] for line in self.steps if line.get("reward", {}).get(task) is not None]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the config's order."""
        if self.status.get("tasks"):
            return list(self.status["tasks"])
        return list(dict.fromkeys(name for line in self.steps for name in line.get("reward", {})))


def tenths(values: list[float]) -> tuple[float, float] | None:
    """Return the means of the first and of the last tenth (at least one value each), or None if empty."""
    if not values:
        return None
    size = max(1, len(values) // 10)
    return sum(values[:size]) / size, sum(values[-size:]) / size


def failure_text(run_dir: Path, attempt: int) -> str:
    """Return who failed first, why and where to read on; nothing if no rank said so."""
    path = run_dir / "logs" / str(attempt) / "failure.json"
    try:
        record = msgspec.json.decode(path.read_bytes(), type=_Failure)
    except (OSError, ValueError):
        return ""
    log = path.with_name(f"{record.component}-{record.rank}.log")
    see = f"; see {log}" if log.exists() else ""
    return f"rank {record.rank} ({record.component} on {record.host}): {record.error}{see}"


def close_status(run_dir: Path, state: str, message: str) -> None:
    """Write the final state into status.json if the coordinator could not."""
    status = _status(run_dir)
    if status.get("state") not in FINAL_STATES:
        _write_over(run_dir, status, state, message)


def reopen_status(run_dir: Path, message: str) -> None:
    """Write into status.json that the run goes on although an attempt of it has failed."""
    _write_over(run_dir, _status(run_dir), "starting", message)


def _write_over(run_dir: Path, status: dict[str, Any], state: str, message: str) -> None:
    # A disk that is full is what the run has failed of, mostly; its end must be told all the same.
    with contextlib.suppress(OSError):
        StatusFile(run_dir).write(status | {"state": state, "message": message, "t": time.time()})


def _status(run_dir: Path) -> dict[str, Any]:
    """Return the status to write over; what a damaged file says matters less than how the run ended."""
    try:
        return read_status(run_dir) or {}
    except UserError:
        return {}


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a text file that are not blank; none if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip(" -\t")][-count:]
