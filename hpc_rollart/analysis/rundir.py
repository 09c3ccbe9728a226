"""Opens everything that a run directory holds, whatever part of it is there."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpc_rollart.observe.metrics import read_metrics
from hpc_rollart.observe.status import read_status
from hpc_rollart.observe.trace import Event, read_timelines
from hpc_rollart.store.files import StoreError
from hpc_rollart.store.reader import RunData, open_run

Rank = tuple[str, int]
"""(component, world rank): how timelines and shards name a rank."""


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
        ``logs/<attempt>/failure.json`` of the last attempt that left one.
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
    failure = None
    failures = sorted((path / "logs").glob("*/failure.json"), key=lambda found: found.stat().st_mtime)
    if failures:
        try:
            failure = json.loads(failures[-1].read_bytes())
        except ValueError:  # whoever wrote it died in the middle
            failure = {"error": f"{failures[-1]} is torn"}
    return RunDir(
        path=path,
        data=data,
        metrics=read_metrics(path),
        status=read_status(path) or {},
        config=yaml.safe_load(config_text) or {},
        config_text=config_text,
        timelines=read_timelines(path),
        failure=failure,
        problems=problems,
    )
