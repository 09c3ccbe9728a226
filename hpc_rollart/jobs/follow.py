"""Shows a run's logs, and follows them while they grow: over new attempts, requeues and further jobs."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpc_rollart.config.layout import world_size
from hpc_rollart.config.load import load_resolved
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book
from hpc_rollart.jobs.commands import Runner, SlurmError
from hpc_rollart.jobs.commands import run as run_command
from hpc_rollart.jobs.queue import Queue
from hpc_rollart.launch.attempt import logs, next_number
from hpc_rollart.launch.view import RunView
from hpc_rollart.observe.status import read_status

POLL_S = 1.0
# One that is resumed on a machine reports several times as often.
_RESUMED_S = 15.0
_BLOCK = 1 << 16


class Sink(Protocol):
    """Takes bytes of a log as they are."""

    def __call__(self, data: bytes) -> object: ...


@dataclass(frozen=True)
class Choice:
    """Which logs of a run: the batch step's, a rank's or a component's, of one attempt or of the newest."""

    rank: int | None = None
    component: str | None = None
    attempt: int | None = None

    def check(self, run_dir: Path) -> None:
        """Raise `UserError` if the run can have no such log."""
        config = load_resolved(run_dir)
        if self.rank is not None and self.component is not None:
            raise UserError("--rank and --component: give one of them")
        if self.rank is not None and not 0 <= self.rank < world_size(config):
            raise UserError(f"--rank {self.rank}: the run has ranks 0 to {world_size(config) - 1}")
        if self.component is not None and self.component not in config.components:
            known = ", ".join(config.components)
            raise UserError(f"--component {self.component}: the run has no such component; it has {known}")
        last = next_number(run_dir) - 1
        if self.attempt is not None and not 0 <= self.attempt <= last:
            there = f"0 to {last}" if last >= 0 else "none yet"
            raise UserError(f"--attempt {self.attempt}: the run has made attempts {there}")

    def files(self, run_dir: Path) -> list[Path]:
        """Return the files as of now; those that are not there yet come later."""
        if self.rank is None and self.component is None and self.attempt is None:
            submitted = book.records(run_dir)
            if submitted:
                return [Path(submitted[-1].log)]
        number = next_number(run_dir) - 1 if self.attempt is None else self.attempt
        if number < 0:
            return []
        folder = logs(run_dir, number)
        if self.rank is None and self.component is None:
            return [folder / "mpirun.log"]
        name = re.escape(self.component) if self.component is not None else r".+"
        rank = str(self.rank) if self.rank is not None else r"\d+"
        pattern = re.compile(rf"{name}-({rank})\.log")
        found = [
            (int(match[1]), path) for path in folder.glob("*.log") if (match := pattern.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found)]


def show(run_dir: Path, choice: Choice, lines: int, sink: Sink) -> None:
    """Write the last `lines` lines of each chosen file; 0 for all of them."""
    files = [path for path in choice.files(run_dir) if path.is_file()]
    if not files:
        raise UserError(f"{run_dir}: there is no such log yet; {_where(run_dir, choice)}")
    tail = Tail(sink, heads=len(files) > 1)
    for path in files:
        tail.begin(path, lines)
        tail.more([path])


def follow(
    run_dir: Path,
    choice: Choice,
    lines: int,
    sink: Sink,
    *,
    runner: Runner = run_command,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write the end of each chosen file and then what is added, until the run's job has ended.

    Files are looked at once a second, Slurm is asked every five seconds at most.

    Raises
    ------
    UserError
        A run of this machine has fallen silent: nobody is left to say that it has ended.
    """
    over = Over(run_dir, runner, clock)
    tail = Tail(sink, heads=True)
    first = True
    while True:
        # Asked before the files are read: what is written before the end is shown in any case.
        ended = over()
        files = choice.files(run_dir)
        for path in files:
            if path.is_file() and path not in tail.offsets:
                tail.begin(path, lines if first else 0)
        # The others too: a job's log has its last lines when the next job's is the newest already.
        tail.more([*(path for path in tail.offsets if path not in files), *files])
        first = first and not tail.offsets
        if over.silence:
            raise UserError(over.silence)
        if ended:
            return
        sleep(POLL_S)


@dataclass
class Tail:
    """Reads what is new in files; a header says which file follows whenever that changes."""

    sink: Sink
    heads: bool
    offsets: dict[Path, int] = field(default_factory=dict)
    _shown: Path | None = None

    def begin(self, path: Path, lines: int) -> None:
        """Start with the last `lines` lines of a file, or with its beginning if that is 0."""
        self.offsets[path] = _offset_of_last(path, lines) if lines else 0

    def more(self, files: Sequence[Path]) -> None:
        """Write what was added since; a file that has become shorter is read from its beginning."""
        for path in files:
            if path not in self.offsets:
                continue
            try:
                with open(path, "rb") as file:
                    if os.fstat(file.fileno()).st_size < self.offsets[path]:
                        self.offsets[path] = 0
                    file.seek(self.offsets[path])
                    while data := file.read(_BLOCK):
                        self._head(path)
                        self.sink(data)
                        self.offsets[path] += len(data)
            except OSError:
                continue  # of a network file system; the next look may do

    def _head(self, path: Path) -> None:
        if self.heads and path != self._shown:
            self.sink(f"{'' if self._shown is None else chr(10)}==> {path} <==\n".encode())
        self._shown = path


class Over:
    """Tells whether a run has ended: here, or with its Slurm job, which may go on after an attempt's end.

    Attributes
    ----------
    silence
        That nobody will ever say so, or nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        runner: Runner = run_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._runner, self._clock = run_dir, runner, clock
        self._limit_s = load_resolved(run_dir).launch.stall_deadline_s
        self._queue: Queue | None = None
        self.silence = ""

    def __call__(self) -> bool:
        submitted = book.records(self._run_dir)
        view = RunView(self._run_dir, status=read_status(self._run_dir) or {})
        if not submitted:  # a run on this machine
            self.silence = view.unheard(self._limit_s)
            return view.final
        if self._queue is None or self._queue.job != submitted[-1].job:
            self._queue = Queue(submitted[-1].job, self._runner, self._clock)
        try:
            if self._queue.state().there:
                return False
        except SlurmError:
            return view.final  # no answer says nothing about the job
        silent = view.silent_s()  # without a job it may go on in front of somebody, after hpc-rollart resume
        return view.final or silent is None or silent > _RESUMED_S


def _offset_of_last(path: Path, lines: int) -> int:
    """Return where the last `lines` lines of a file begin, reading no more of it than needed."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        position, found = end, 0
        while position > 0:
            size = min(_BLOCK, position)
            position -= size
            file.seek(position)
            block = file.read(size)
            for index in range(len(block) - 1, -1, -1):
                # The newline that ends the last line begins no further one.
                if block[index] == 0x0A and position + index != end - 1:
                    found += 1
                    if found == lines:
                        return position + index + 1
    return 0


def _where(run_dir: Path, choice: Choice) -> str:
    submitted = book.records(run_dir)
    if submitted and choice == Choice():
        job = f"job {submitted[-1].job} has written none"
        return f"{job}: it has not started, or its nodes do not see this directory; see hpc-rollart status"
    number = next_number(run_dir) - 1 if choice.attempt is None else choice.attempt
    if number < 0:
        return "no attempt was started"
    names = sorted(path.name for path in logs(run_dir, number).glob("*.log"))
    return f"attempt {number} has {', '.join(names[:8]) or 'none'}" + (", ..." if len(names) > 8 else "")
