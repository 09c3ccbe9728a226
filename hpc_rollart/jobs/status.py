"""How a run and its Slurm job stand, for a person and for programs."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hpc_rollart.config.load import load_resolved
from hpc_rollart.config.problem import short
from hpc_rollart.jobs import book, events
from hpc_rollart.jobs.book import JobRecord
from hpc_rollart.jobs.commands import SlurmError
from hpc_rollart.jobs.queue import JobState, Phase, Queue
from hpc_rollart.jobs.reasons import explain_reason
from hpc_rollart.launch.attempt import next_number
from hpc_rollart.launch.progress import clock as clock_text
from hpc_rollart.launch.view import RunView, last_lines, tenths

Verdict = Literal["waiting", "starting", "running", "stopping", "done", "failed", "stopped", "unknown"]
EXIT_CODES: dict[Verdict, int] = {"failed": 3, "unknown": 3, "stopped": 130}
_LOG_END = 200
_STYLES = {"done": "green", "running": "green", "failed": "red", "unknown": "red"}


@dataclass(frozen=True)
class PartStatus:
    """One het component."""

    component: str
    partition: str
    nodes: int
    ranks: int
    gpus: int
    state: str = ""
    node_list: str = ""
    reason: str = ""
    explanation: str = ""
    start: float | None = None
    time_left_s: float | None = None


@dataclass(frozen=True)
class Status:
    """A run as of one moment; `asdict` gives what `hpc-rollart status --json` prints.

    Attributes
    ----------
    verdict
        The whole in a word; `text` says why where that is not plain.
    job, phase, requeues
        The Slurm job, or None for a run that was never submitted or where Slurm does not say.
    last_sign_s
        Seconds since the run last wrote of itself.
    event
        What the supervisor or the guard last did: `t`, `event`, `message`.
    """

    name: str
    dir: str
    verdict: Verdict
    text: str
    job: int | None = None
    phase: str | None = None
    requeues: int | None = None
    components: list[PartStatus] = field(default_factory=list)
    attempt: int | None = None
    step: int | None = None
    steps: int | None = None
    reward: dict[str, dict[str, float]] = field(default_factory=dict)
    staleness: dict[str, Any] | None = None
    tokens_per_s: float | None = None
    last_sign_s: float | None = None
    event: dict[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """0 while all is well; 3 for a failure, 130 for a run that was stopped early."""
        return EXIT_CODES.get(self.verdict, 0)

    @property
    def over(self) -> bool:
        """Whether nothing changes any more by itself."""
        return self.verdict in ("done", "failed", "stopped")

    def as_json(self) -> dict[str, Any]:
        """Return the status as plain data."""
        return asdict(self)


class Watcher:
    """Looks at a run again and again, at Slurm no more often than it may be asked."""

    def __init__(
        self,
        run_dir: Path,
        make_queue: Callable[[int], Queue] = Queue,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._dir, self._make, self._now = run_dir.absolute(), make_queue, now
        self._config = load_resolved(run_dir)
        self._view = RunView(run_dir)
        self._queue: Queue | None = None
        self._seen: tuple[JobState | None, int | None] = (None, None)

    def look(self) -> Status:
        """Return how the run stands now."""
        self._view.refresh()
        submitted = book.records(self._dir)
        record = submitted[-1] if submitted else None
        state, requeues, trouble = self._ask(record)
        event = _last_event(self._dir, record.job if record else None)
        verdict, text = judge(self._view, state, event, record, trouble=trouble)
        if book.is_cancelled(self._dir) and verdict in ("failed", "stopped"):
            verdict, text = "stopped", "cancelled; hpc-rollart resubmit goes on"
        status, attempt = self._view.status, next_number(self._dir) - 1
        return Status(
            name=self._config.run.name,
            dir=str(self._dir),
            verdict=verdict,
            text=text,
            job=record.job if record else None,
            phase=state.phase.value if state is not None else None,
            requeues=requeues,
            components=_components(record, state),
            attempt=attempt if attempt >= 0 else None,
            step=status.get("step"),
            steps=status.get("steps", self._config.run.steps),
            reward=self._rewards(),
            event=event,
            staleness=status.get("staleness"),
            tokens_per_s=status.get("tokens_per_s"),
            last_sign_s=max(0.0, self._now() - status["t"]) if "t" in status else None,
        )

    def _rewards(self) -> dict[str, dict[str, float]]:
        ends = {name: tenths(self._view.rewards(name)) for name in self._view.tasks}
        return {name: {"first": pair[0], "now": pair[1]} for name, pair in ends.items() if pair}

    def _ask(self, record: JobRecord | None) -> tuple[JobState | None, int | None, str]:
        if record is None:
            return None, None, ""
        if self._queue is None or self._queue.job != record.job:
            self._queue = self._make(record.job)
        try:
            state = self._queue.state()
        except SlurmError as error:
            return None, None, short(str(error).splitlines()[0], _LOG_END)
        if state is not self._seen[0]:  # asked anew
            self._seen = (state, self._queue.restarts() if state.known else None)
        return state, self._seen[1], ""


def judge(
    view: RunView,
    state: JobState | None,
    event: dict[str, Any] | None,
    record: JobRecord | None,
    *,
    trouble: str,
) -> tuple[Verdict, str]:
    """Return how a run stands, from what it, its supervisor and Slurm say."""
    said = view.state
    if said == "done":
        return "done", ""
    if trouble:
        own: Verdict = "running" if said in ("running", "stopping") else "unknown"
        return own, f"Slurm does not say: {trouble}"
    if state is not None and state.there:
        if state.phase is Phase.WAITING:
            if event is not None and event["event"] == "replaced":
                return "waiting", f"in place of a job that could not go on: {event['message']}"
            return "waiting", "for its next part" if said else ""
        if state.phase is Phase.UNKNOWN:
            return "running", f"Slurm says {state.parts[0].state}, which is not known here"
        if event is not None and event["event"] == "requeued" and state.phase is Phase.RUNNING:
            return "starting", event["message"]  # it is back, and its supervisor has not said a word yet
        if event is not None and event["event"] in ("stopping", "requeued", "ends"):
            return "stopping", event["message"]
        if said == "failed":
            why = f": {view.message}" if view.message else ""
            return "starting", f"an attempt failed, the next may follow{why}"
        if state.phase is Phase.ENDING or said == "stopping":
            return "stopping", view.message
        # What an attempt before this one has left says nothing of the present one.
        return ("running" if said == "running" else "starting"), view.message if said == "running" else ""
    if said == "failed":
        return "failed", view.message
    if said == "interrupted":
        return "stopped", view.message or "before all steps were done"
    if record is None:
        silent = view.silent_s()
        if silent is not None and silent < 60.0:
            return ("stopping" if said == "stopping" else "running"), view.message
        return "failed", "it no longer reports, and never said that it ended" if said else "it never started"
    how = state.ended_as if state is not None and state.known else "a while ago"
    # The batch step says what kept the run from going on, or even from starting.
    end = "".join(last_lines(Path(record.log), 1)).strip()
    why = f'; its log ends: "{end[:_LOG_END]}"' if end else ""
    return "failed", f"the job ended ({how}) before the run was done; hpc-rollart resubmit goes on{why}"


def _components(record: JobRecord | None, state: JobState | None) -> list[PartStatus]:
    if record is None:
        return []
    found = {part.offset: part for part in state.parts} if state is not None else {}
    out = []
    for offset, ours in enumerate(record.components):
        there = found.get(offset)
        if there is None:
            out.append(PartStatus(**asdict(ours)))
            continue
        reason = there.reason if there.phase is Phase.WAITING else ""
        out.append(
            PartStatus(
                ours.component,
                there.partition or ours.partition,
                ours.nodes,
                ours.ranks,
                ours.gpus,
                there.state,
                there.node_list,
                reason,
                explain_reason(reason) if reason else "",
                there.start,
                there.time_left_s if there.phase is Phase.RUNNING else None,
            )
        )
    return out


def _last_event(run_dir: Path, job: int | None) -> dict[str, Any] | None:
    """Return what the job's supervisor or guard last wrote down, or None.

    After a resubmission the last line may be the job's before, which says nothing of the present one, but for
    that this one takes its place.
    """
    last = next(events.newest_first(run_dir), None)
    if last is None or (job is not None and str(last.job) != str(job) and last.by != job):
        return None
    return {"t": last.t, "event": last.event, "message": last.message}


# --- for a person ------------------------------------------------------------------------------------


def render(status: Status) -> RenderableType:
    """Return the status as a small page."""
    title = Text.assemble(
        (status.name, "bold"), "  ", (status.verdict, _STYLES.get(status.verdict, "yellow"))
    )
    if status.text:
        title.append(f"  {status.text}")
    parts: list[RenderableType] = [title, Text()]
    if status.components:
        parts += [_jobs(status), *_notes(status), Text()]
    parts.append(_run(status))
    if status.reward:
        parts += [Text(), _rewards(status)]
    return Padding(Group(*parts), (1, 2), expand=False)


def _jobs(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("component", "partition", "nodes", "ranks", "GPUs", f"job {status.job}", "on"):
        table.add_column(name, justify="right" if name in ("nodes", "ranks", "GPUs") else "left")
    for part in status.components:
        table.add_row(
            Text(part.component, style="bold"), part.partition or "-", str(part.nodes), str(part.ranks),
            str(part.gpus or "-"), part.state.lower() or "-", part.node_list,
        )  # fmt: skip
    return table


def _notes(status: Status) -> list[Text]:
    reasons: dict[str, list[str]] = {}
    for part in status.components:
        if part.reason:
            reasons.setdefault(f"{part.explanation} ({part.reason})", []).append(part.component)
    # Slurm says the same of all components mostly, since they start together.
    every = len(reasons) == 1
    return [Text(f"{'the job' if every else ', '.join(names)}: {text}") for text, names in reasons.items()]


def _run(status: Status) -> Table:
    rows: list[tuple[str, str]] = []
    if status.step is not None:
        rows.append(("step", f"{status.step} of {status.steps}"))
    starts = [part.start for part in status.components if part.start is not None]
    if starts and status.verdict == "waiting":
        rows.append(("starts", time.strftime("%F %H:%M", time.localtime(max(starts))) + ", as Slurm expects"))
    left = [part.time_left_s for part in status.components if part.time_left_s is not None]
    if left:
        rows.append(("time left", f"{clock_text(min(left))} of this job"))
    if status.staleness:
        rows.append(("staleness", f"mean {status.staleness['mean']:.2f}, max {status.staleness['max']}"))
    if status.tokens_per_s and status.verdict == "running":
        rows.append(("tokens/s", f"{status.tokens_per_s:,.0f}"))
    if status.attempt is not None:
        again = f", after {status.requeues} requeue{'s' * (status.requeues != 1)}" if status.requeues else ""
        rows.append(("attempt", f"{status.attempt}{again}"))
    if status.last_sign_s is not None and not status.over:
        rows.append(("last sign", f"{clock_text(status.last_sign_s)} ago"))
    if status.event is not None:
        said = ": ".join(filter(None, (status.event["event"], status.event["message"])))
        rows.append(("last event", f"{said}, {time.strftime('%F %H:%M', time.localtime(status.event['t']))}"))
    rows.append(("run", status.dir))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _rewards(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("task")
    for name in ("reward first", "now"):
        table.add_column(name, justify="right")
    for name, ends in status.reward.items():
        table.add_row(name, f"{ends['first']:.3f}", f"{ends['now']:.3f}")
    return table
