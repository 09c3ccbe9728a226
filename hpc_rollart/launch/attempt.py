"""One start of a run: its number, the nodes it has, and the checkpoint it goes on from."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rollart.config.layout import with_nodes
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.launch.rundir import write_json

_FILE = "attempt.json"


@dataclass(frozen=True)
class Attempt:
    """What the ranks of one start must know beside the config; kept as ``logs/<number>/attempt.json``.

    Attributes
    ----------
    number
        From 0; every start of a run has its own, in whichever Slurm job it is.
    step
        Steps that are done; the first one to do.
    checkpoint
        Absolute path of the checkpoint to start from; None for the model itself.
    nodes
        Nodes of each component that has fewer than the config says, because some were lost.
    """

    number: int
    step: int = 0
    checkpoint: str | None = None
    nodes: dict[str, int] = field(default_factory=dict)

    def effective(self, config: RunConfig) -> RunConfig:
        """Return the config that the ranks of this attempt run."""
        return with_nodes(config, self.nodes)

    def write(self, run_dir: Path) -> None:
        """Make the attempt's log folder and write this into it."""
        folder = logs(run_dir, self.number)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _FILE, asdict(self))

    @classmethod
    def read(cls, run_dir: Path, number: int) -> "Attempt":
        """Read what `write` wrote."""
        found: dict[str, Any] = json.loads((logs(run_dir, number) / _FILE).read_text(encoding="utf-8"))
        return cls(**found)


def logs(run_dir: Path, number: int) -> Path:
    """Return the folder of an attempt's logs."""
    return run_dir / "logs" / str(number)


def next_number(run_dir: Path) -> int:
    """Return the number of the next attempt: one more than the last that was begun, or 0."""
    found = [int(path.name) for path in (run_dir / "logs").glob("[0-9]*") if path.name.isdecimal()]
    return max(found, default=-1) + 1
