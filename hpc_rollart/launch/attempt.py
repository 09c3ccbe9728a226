"""One start of a run: its number, the nodes it has, and the checkpoint it goes on from."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from hpc_rollart.config.layout import with_nodes
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import UserError
from hpc_rollart.launch.rundir import write_json, writing
from hpc_rollart.observe.status import STATUS_FILE, StatusFile, read_status
from hpc_rollart.store.checkpoints import check_checkpoint, latest_checkpoint, steps_saved

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
    passed_over
        Why a newer checkpoint is not the one to start from; nothing if this is the newest.
    """

    number: int
    step: int = 0
    checkpoint: str | None = None
    nodes: dict[str, int] = field(default_factory=dict)
    passed_over: str = ""

    def effective(self, config: RunConfig) -> RunConfig:
        """Return the config that the ranks of this attempt run."""
        return with_nodes(config, self.nodes)

    def write(self, run_dir: Path) -> None:
        """Make the attempt's log folder and write this into it.

        What status.json says of the attempt before is over from here on: whoever watches must not take it
        for the state of this one.
        """
        folder = logs(run_dir, self.number)
        status = read_status(run_dir)  # before anything is made: it may be damaged
        with writing(folder):
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                raise UserError(f"{folder}: another program has just begun this attempt of the run") from None
            write_json(folder / _FILE, asdict(self))
        if status:
            now = {"state": "starting", "attempt": self.number, "step": self.step, "message": ""}
            with writing(run_dir / STATUS_FILE):
                StatusFile(run_dir).write(status | now | {"t": time.time(), "eta_s": None, "in_flight": 0})

    @classmethod
    def read(cls, run_dir: Path, number: int) -> "Attempt":
        """Read what `write` wrote."""
        path = logs(run_dir, number) / _FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{path}: not an attempt of a run ({error}); start the run again") from None


def logs(run_dir: Path, number: int) -> Path:
    """Return the folder of an attempt's logs."""
    return run_dir / "logs" / str(number)


def next_number(run_dir: Path) -> int:
    """Return the number of the next attempt: one more than the last that was begun, or 0."""
    found = [int(path.name) for path in (run_dir / "logs").glob("[0-9]*") if path.name.isdecimal()]
    return max(found, default=-1) + 1


def next_attempt(run_dir: Path, config: RunConfig, nodes: Mapping[str, int] | None = None) -> Attempt:
    """Decide where the next attempt of the run in `run_dir` begins; nothing is written.

    It goes on from the newest whole checkpoint of the run itself. Without one it begins at step 0, with the
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
        No checkpoint of the run is whole, or the one to start from is not.
    """
    number, resume = next_number(run_dir), config.checkpoint.resume
    fewer = dict(nodes or {})
    own = None if number == 0 and resume != "auto" else _latest(run_dir / "checkpoints")
    if own is not None:
        return _from_newest(own, number, fewer)
    if resume in ("auto", "never"):
        return Attempt(number, nodes=fewer)
    other = Path(resume).expanduser().absolute()
    try:
        check_checkpoint(other, ledger=False)
    except UserError as error:
        raise UserError(f"checkpoint.resume: {error}") from None
    return Attempt(number, 0, str(other), fewer)


def _from_newest(newest: Path, number: int, nodes: dict[str, int]) -> Attempt:
    """Return the attempt that goes on from `newest`, or from the last whole one where that is damaged."""
    older = [path for path in steps_saved(newest.parent).values() if path.name < newest.name]
    damage: UserError | None = None
    for folder in (newest, *older):
        try:
            step = check_checkpoint(folder, ledger=True)
        except UserError as error:
            damage = damage or error
        else:
            return Attempt(number, step, str(folder), nodes, str(damage) if damage else "")
    assert damage is not None
    raise damage


def _latest(checkpoints: Path) -> Path | None:
    try:
        return latest_checkpoint(checkpoints.absolute())
    except (OSError, ValueError) as error:
        raise UserError(f"{checkpoints / 'LATEST'} cannot be read: {error}") from None
