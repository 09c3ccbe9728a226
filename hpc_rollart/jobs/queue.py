"""What Slurm says of a job: squeue while it lists it, then sacct or scontrol; asked at most every 5 s."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from hpc_rollart.jobs import commands
from hpc_rollart.jobs.commands import CommandMissing, Runner, SlurmError

POLL_S = 5.0


class Phase(Enum):
    """Where a job stands, which is all that a program needs to know of Slurm's many states."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """A state from another Slurm than the known ones: whoever decides treats the job as still there."""


_STATES = {
    Phase.WAITING: (
        "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT"  # the last: requeued, and held
    ),
    Phase.RUNNING: "CONFIGURING RUNNING RESIZING SIGNALING STOPPED SUSPENDED",
    Phase.ENDING: "COMPLETING STAGE_OUT",
    Phase.ENDED: (
        "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT"
    ),
}
PHASES = {state: phase for phase, states in _STATES.items() for state in states.split()}


def phase_of(state: str) -> Phase:
    """Return the phase of a state as any of Slurm's commands writes it."""
    word = re.match(r"[A-Za-z_]*", state.strip())
    # sacct writes "CANCELLED by 1000"; in narrow columns a "+" stands for the rest of a word.
    name = word.group().upper() if word else ""
    if name in PHASES:
        return PHASES[name]
    if state.strip().endswith("+") and len(name) >= 5:
        fits = {phase for known, phase in PHASES.items() if known.startswith(name)}
        return fits.pop() if len(fits) == 1 else Phase.UNKNOWN
    return Phase.UNKNOWN


@dataclass(frozen=True)
class Part:
    """One het component of a job as Slurm has it.

    Attributes
    ----------
    offset
        Its number in the job, from 0.
    reason
        Slurm's word why it waits or ended, empty if it gives none.
    time_left_s
        Until its time limit, or None.
    start
        Unix seconds when it started or is expected to, or None.
    """

    offset: int
    state: str
    partition: str = ""
    nodes: int = 0
    node_list: str = ""
    reason: str = ""
    time_left_s: float | None = None
    start: float | None = None

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return phase_of(self.state)


@dataclass(frozen=True)
class JobState:
    """A job as Slurm has it; without parts it has forgotten the job, which ended a while ago.

    Attributes
    ----------
    restarts
        How often it was requeued; None where Slurm does not say.
    """

    parts: tuple[Part, ...] = ()
    restarts: int | None = None

    @property
    def phase(self) -> Phase:
        """Where the whole job stands: as far as its component that is furthest from the end."""
        phases = {part.phase for part in self.parts}
        for phase in (Phase.RUNNING, Phase.UNKNOWN, Phase.ENDING, Phase.WAITING):
            if phase in phases:
                return phase
        return Phase.ENDED

    @property
    def there(self) -> bool:
        """Whether the job is still queued or running; a state that is not known counts as that."""
        return self.phase is not Phase.ENDED

    @property
    def known(self) -> bool:
        """Whether Slurm still knows the job."""
        return bool(self.parts)

    @property
    def ended_as(self) -> str:
        """How the first component that did not end well ended, such as TIMEOUT; else COMPLETED."""
        words = [part.state.split()[0].rstrip("+") for part in self.parts if part.state.strip()]
        return next((word for word in words if word != "COMPLETED"), words[0] if words else "")


@dataclass
class Queue:
    """Asks Slurm for one job's state, never more often than every `every_s` however often it is asked.

    Parameters
    ----------
    job
        The job's id; a het job's is its first component's.
    runner
        Runs a command of Slurm's.
    clock
        Seconds that only grow.
    """

    job: int
    runner: Runner = commands.run
    clock: Callable[[], float] = time.monotonic
    every_s: float = POLL_S
    _asked: float = float("-inf")
    _state: JobState = field(default_factory=JobState)
    _error: SlurmError | None = None
    _no_sacct: bool = False

    def state(self) -> JobState:
        """Return the job's state, at most `every_s` old.

        Raises
        ------
        SlurmError
            Slurm did not answer. This says nothing about the job.
        """
        if self.clock() >= self._asked + self.every_s:
            try:
                self._state, self._error = self._ask(), None
            except SlurmError as error:
                self._error = error
            self._asked = self.clock()
        if self._error is not None:
            raise self._error
        return self._state

    def _ask(self) -> JobState:
        parts = _known(self.runner, squeue_command(self.job), parse_squeue)
        if parts:
            return JobState(tuple(parts))
        # squeue lists an ended job for some minutes only. The accounting keeps it, where there is one.
        if not self._no_sacct:
            try:
                parts = parse_sacct(self.runner(sacct_command(self.job)))
            except SlurmError:
                self._no_sacct = True
        return JobState(tuple(parts)) if parts else self._ask_scontrol()

    def _ask_scontrol(self) -> JobState:
        try:
            return parse_scontrol(self.runner(scontrol_command(self.job)))
        except CommandMissing:
            raise
        except SlurmError as error:
            if _no_such_job(error):
                return JobState()
            raise

    def restarts(self) -> int | None:
        """Return how often the job was requeued, or None where Slurm does not say; asks every time."""
        try:
            return self._ask_scontrol().restarts
        except SlurmError:
            return None


def _known(runner: Runner, command: Sequence[str], parse: Callable[[str], list[Part]]) -> list[Part]:
    try:
        return parse(runner(command))
    except CommandMissing:
        raise
    except SlurmError as error:
        if _no_such_job(error):
            return []
        raise


def _no_such_job(error: SlurmError) -> bool:
    return "invalid job id" in error.said.lower()


# --- commands and their answers ----------------------------------------------------------------------


def squeue_command(job: int) -> list[str]:
    """Return the command whose output `parse_squeue` reads: every component, ended ones included."""
    # The reason last: it is free text.
    form = "%i|%T|%P|%D|%L|%S|%N|%r"
    return ["squeue", "--noheader", "--all", "--states=all", f"--jobs={job}", f"--format={form}"]


def own_jobs(runner: Runner) -> list[tuple[int, str]]:
    """Return the user's jobs that squeue lists, each with the file that was given to sbatch."""
    said = runner(["squeue", "--noheader", "--all", "--states=all", "--me", "--format=%i|%o"])
    lines = (line.strip().partition("|") for line in said.splitlines())
    return list(dict.fromkeys((_number(name), command) for name, _, command in lines if command))


def parse_squeue(text: str) -> list[Part]:
    """Read squeue's lines; lines of another form are passed over."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 7)]
        if len(fields) == 8 and fields[0]:
            name, state, partition, nodes, left, start, node_list, reason = fields
            part = Part(_offset(name), state, partition, _number(nodes), _given(node_list), _given(reason))
            found.append(_timed(part, _duration(left), start))
    return sorted(found, key=lambda part: part.offset)


def sacct_command(job: int) -> list[str]:
    """Return the command whose output `parse_sacct` reads."""
    form = "JobID,State,Partition,NNodes,Start,NodeList"
    return ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", f"--format={form}"]


def parse_sacct(text: str) -> list[Part]:
    """Read sacct's lines; steps are passed over, and the last line of a component counts."""
    found = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 6 and fields[0] and "." not in fields[0]:
            name, state, partition, nodes, start, node_list = fields
            part = Part(_offset(name), state, partition, _number(nodes), _given(node_list))
            found[part.offset] = _timed(part, None, start)
    return [found[offset] for offset in sorted(found)]


def scontrol_command(job: int) -> list[str]:
    """Return the command whose output `parse_scontrol` reads."""
    return ["scontrol", "--oneliner", "show", "job", str(job)]


def parse_scontrol(text: str) -> JobState:
    """Read `scontrol --oneliner show job`: a line a component."""
    parts, restarts = [], None
    for line in text.splitlines():
        # Values may hold blanks, but none of those that are read here does.
        values = dict(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", line))
        if "JobState" not in values:
            continue
        part = Part(
            _number(values.get("HetJobOffset", "0")),
            values["JobState"],
            values.get("Partition", ""),
            _number(values.get("NumNodes", "0").split("-")[0]),
            _given(values.get("NodeList", "")),
            _given(values.get("Reason", "")),
        )
        parts.append(_timed(part, None, values.get("StartTime", "")))
        if part.offset == 0 and "Restarts" in values:
            restarts = _number(values["Restarts"])
    return JobState(tuple(sorted(parts, key=lambda part: part.offset)), restarts)


def _timed(part: Part, left: float | None, start: str) -> Part:
    try:
        at = datetime.fromisoformat(start).timestamp()
    except ValueError:  # N/A, Unknown, None: Slurm cannot tell
        at = None
    return Part(part.offset, part.state, part.partition, part.nodes, part.node_list, part.reason, left, at)


def _offset(name: str) -> int:
    """Return the component's number from `1012+1`; a job of one component has no plus."""
    return _number(name.partition("+")[2])


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 0


def _given(text: str) -> str:
    return "" if text in ("None", "(null)", "N/A", "None assigned") else text


def _duration(text: str) -> float | None:
    """Return Slurm's `1-02:03:04`, `02:03:04` or `03:04` in seconds; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
