"""One start of a run: its number, the nodes it has, and the checkpoint it goes on from."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rollart.config.layout import with_nodes
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import UserError
from hpc_rollart.launch.rundir import write_json
from hpc_rollart.observe.status import StatusFile, read_status
from hpc_rollart.store.checkpoints import check_checkpoint, latest_checkpoint

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
        """Make the attempt's log folder and write this into it.

        What status.json says of the attempt before is over from here on: whoever watches must not take it
        for the state of this one.
        """
        folder = logs(run_dir, self.number)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"{folder}: another program has just begun this attempt of the run") from None
        write_json(folder / _FILE, asdict(self))
        if status := read_status(run_dir):
            now = {"state": "starting", "attempt": self.number, "step": self.step, "message": ""}
            StatusFile(run_dir).write(status | now | {"t": time.time(), "eta_s": None, "in_flight": 0})

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


def next_attempt(run_dir: Path, config: RunConfig, nodes: Mapping[str, int] | None = None) -> Attempt:
    """Decide where the next attempt of the run in `run_dir` begins; nothing is written.

    It goes on from the newest checkpoint of the run itself. Without one it begins at step 0, with the
    checkpoint that `checkpoint.resume` names or else the model. `auto` and `never` differ in the run's first
    attempt alone: `never` passes over checkpoints that somebody has put into its directory.

    Parameters
    ----------
    run_dir, config
        The run.
    nodes
        Nodes of each component that has fewer than the config says.

    Raises
    ------
    UserError
        The checkpoint to start from is damaged or not there.
    """
    number, resume = next_number(run_dir), config.checkpoint.resume
    fewer = dict(nodes or {})
    own = None if number == 0 and resume != "auto" else _latest(run_dir / "checkpoints")
    if own is not None:
        return Attempt(number, check_checkpoint(own, ledger=True), str(own), fewer)
    if resume in ("auto", "never"):
        return Attempt(number, nodes=fewer)
    other = Path(resume).expanduser().absolute()
    try:
        check_checkpoint(other, ledger=False)
    except UserError as error:
        raise UserError(f"checkpoint.resume: {error}") from None
    return Attempt(number, 0, str(other), fewer)


def _latest(checkpoints: Path) -> Path | None:
    try:
        return latest_checkpoint(checkpoints.absolute())
    except (OSError, ValueError) as error:
        raise UserError(f"{checkpoints / 'LATEST'} cannot be read: {error}") from None
