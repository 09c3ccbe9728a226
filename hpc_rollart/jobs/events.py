"""What a job's supervisor and guard did, one line each in RUN/slurm/events.jsonl."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hpc_rollart.jobs import book
from hpc_rollart.launch.rundir import append_line

EVENTS_FILE = "events.jsonl"


class Event(msgspec.Struct):
    """One line, as far as programs rely on it; its time is one that can be shown."""

    t: Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
    event: str
    job: str | int = ""
    message: str = ""
    step: int | None = None
    by: int | None = None


def write(run_dir: Path, event: str, **more: Any) -> None:
    """Add an event of this job; raises `OSError` if it cannot be written."""
    line = json.dumps({"t": time.time(), "job": os.environ.get("SLURM_JOB_ID", ""), "event": event, **more})
    append_line(book.folder(run_dir) / EVENTS_FILE, line)


def newest_first(run_dir: Path) -> Iterator[Event]:
    """Yield the run's events, the newest first; damaged lines, such as a kill leaves, are passed over."""
    try:
        lines = (book.folder(run_dir) / EVENTS_FILE).read_bytes().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            yield msgspec.json.decode(line, type=Event)
        except (ValueError, RecursionError):
            continue
