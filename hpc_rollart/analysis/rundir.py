"""Opens everything that a run directory holds, whatever part of it is there."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpc_rollart.observe.status import read_status
from hpc_rollart.observe.steps import read_metrics
from hpc_rollart.observe.trace import Event, read_timelines
from hpc_rollart.store.files import StoreError
from hpc_rollart.store.reader import RunData, open_run

Rank = tuple[str, int]
"""(component, world rank): how timelines and shards name a rank."""


CLEAN_ENDS = ("done", "interrupted")


@dataclass(frozen=True)
class AttemptView:
    """One start of the run.

    Attributes
    ----------
    step
        The step that it began at.
    state
        How it ended, or the run's state if it goes on; ``killed`` if nobody could say so.
    started
        Trajectories that it started; None where that is not known.
    """

    number: int
    step: int
    state: str
    started: int | None = None

    @property
    def clean(self) -> bool:
        """Whether it ended in good order, so that everything that it started has its row."""
        return self.state in CLEAN_ENDS


@dataclass(frozen=True)
class RunDir:
    """A run as found on disk.

    Attributes
    ----------
    data
        Shards and batch logs; None when the run never made a shard directory.
    metrics
        Lines of ``metrics.jsonl`` in order of step.
    status
        Last ``status.json``; empty when there is none.
    config, config_text
        ``config.yaml`` parsed and as written; empty when there is none.
    timelines
        Events by rank.
    failure
        ``logs/<attempt>/failure.json`` of the last attempt, if it left one.
    attempts
        The starts of the run, in order; at least one.
    problems
        What could not be read, one line each.
    """

    path: Path
    data: RunData | None
    metrics: list[dict[str, Any]]
    status: dict[str, Any]
    config: dict[str, Any]
    config_text: str
    timelines: dict[Rank, list[Event]]
    failure: dict[str, Any] | None
    attempts: list[AttemptView]
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's name, or its directory's where the config is missing."""
        return str(self.config.get("run", {}).get("name") or self.path.resolve().name)

    @property
    def state(self) -> str:
        """``done``, ``interrupted``, ``failed``, ``running`` … as last reported; ``unknown`` if never."""
        if self.failure is not None:
            return "failed"
        return str(self.status.get("state", "unknown"))

    @property
    def alpha(self) -> int | None:
        """The staleness bound the run was configured with."""
        value = self.config.get("schedule", {}).get("alpha")
        return None if value is None else int(value)

    def role(self, component: str) -> str:
        """Role of a component as configured; its own name where the config does not say."""
        return str(self.config.get("components", {}).get(component, {}).get("role", component))


def open_run_dir(path: Path) -> RunDir:
    """Read `path`; only a missing directory is an error, anything less complete is told in `problems`.

    Raises
    ------
    StoreError
        `path` is not a directory.
    """
    path = Path(path)
    if not path.is_dir():
        raise StoreError(f"{path} is not a directory")
    problems: list[str] = []
    data = None
    try:
        data = open_run(path)
        problems += data.problems
    except StoreError as error:
        problems.append(str(error))
    config_path = path / "config.yaml"
    config_text = config_path.read_text() if config_path.exists() else ""
    if not config_text:
        problems.append(f"{config_path} is missing")
    status = read_status(path) or {}
    attempts, failure = _attempts(path, status)
    return RunDir(
        path=path,
        data=data,
        metrics=read_metrics(path),
        status=status,
        config=yaml.safe_load(config_text) or {},
        config_text=config_text,
        timelines=read_timelines(path),
        failure=failure,
        attempts=attempts,
        problems=problems,
    )


def _attempts(path: Path, status: dict[str, Any]) -> tuple[list[AttemptView], dict[str, Any] | None]:
    """The run's attempts, and how the last one failed if it did."""
    numbers = sorted(int(folder.name) for folder in (path / "logs").glob("*") if folder.name.isdecimal())
    found, failure = [], None
    for number in numbers or [0]:
        folder = path / "logs" / str(number)
        begun, end, failure = (_read(folder / f"{name}.json") for name in ("attempt", "end", "failure"))
        if end:
            state = str(end.get("state"))
        elif failure:
            state = "failed"
        elif number == max(numbers, default=0):
            state = str(status.get("state", "unknown"))
            if state == "interrupted" and numbers:  # by somebody else's word: it wrote none of its own
                state = "killed"
        else:
            state = "killed"
        found.append(AttemptView(number, (begun or {}).get("step", 0), state, (end or {}).get("started")))
    return found, failure


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except OSError:
        return None
    except ValueError:  # whoever wrote it died in the middle
        return {"error": f"{path} is torn"}
    return content if isinstance(content, dict) else None
