"""Shows a run while it goes: a calm live panel on a terminal, one line a step anywhere else."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hpc_rollart.launch.view import RunView, tenths


@dataclass(frozen=True)
class Glyphs:
    """Characters to draw with."""

    mark: str
    dot: str
    none: str
    wait: str
    spinner: str
    blocks: str


UNICODE = Glyphs("●", "·", "–", "…", "dots", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("*", "|", "-", "...", "line", "_.-=+*#@")

_SPARK_WIDTH = 24
_NARROW = 80
_SILENT_AFTER_S = 15.0
_MARKS = {"running": "green", "done": "green", "failed": "red", "interrupted": "yellow"}


class Display(Protocol):
    """Something that shows a run; call `update` a few times a second."""

    def phase(self, text: str) -> None:
        """Say what is being waited for before the first step."""

    def update(self, *, stopping: bool = False) -> None:
        """Read the run directory and show what is new."""

    def close(self) -> None:
        """Show the last state and stop drawing."""


def make_display(run_dir: Path, name: str, console: Console, *, live: bool) -> Display:
    """Return the display that suits `console`: live on a terminal unless `live` is false."""
    view = RunView(run_dir)
    return LiveDisplay(view, name, console) if live and console.is_terminal else PlainDisplay(view, console)


# --- the live panel ----------------------------------------------------------------------------------


class LiveDisplay:
    """A panel that is redrawn in place."""

    def __init__(self, view: RunView, name: str, console: Console) -> None:
        self._view, self._name, self._console = view, name, console
        self._phase, self._begun, self._stopping = "starting", time.time(), False
        self._glyphs = ASCII if console.options.ascii_only else UNICODE
        self._spinner = Spinner(self._glyphs.spinner, style="cyan")
        # Redrawn by `update` alone: a thread of rich's own would draw while the run directory is being read.
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def phase(self, text: str) -> None:
        """Say what is being waited for before the first step."""
        self._phase = text
        self.update()

    def update(self, *, stopping: bool = False) -> None:
        """Read the run directory and draw."""
        self._stopping = stopping or self._stopping
        self._view.refresh()
        self._live.update(self.render(), refresh=True)

    def close(self) -> None:
        """Leave the last drawing on the screen."""
        try:
            self.update()
        finally:
            self._live.stop()  # or the terminal would stay without a cursor

    def render(self) -> RenderableType:
        """Return the panel as of the last `update`."""
        status = self._view.status
        parts: list[RenderableType] = [self._header(), self._bar()]
        if self._view.tasks and self._view.steps:
            parts.append(self._tasks())
        if self._view.state in ("", "starting"):
            self._spinner.update(text=Text(f"{self._phase} {self._glyphs.wait}", style="dim"))
            parts.append(self._spinner)
        else:
            parts.append(_figures(status, self._glyphs.none, narrow=self._narrow))
        if note := self._note():
            parts.append(note)
        spaced = [part for item in parts for part in (item, Text())]
        return Padding(Group(*spaced[:-1]), (1, 2))

    @property
    def _narrow(self) -> bool:
        return self._console.width < _NARROW

    def _header(self) -> RenderableType:
        state = self._view.state or "starting"
        if self._stopping and not self._view.final:
            state = "stopping"
        status = self._view.status
        begun = status.get("t_start", self._begun)
        now = status.get("t", time.time()) if self._view.final else time.time()
        elapsed = clock(now - begun) + " elapsed"
        eta = status.get("eta_s")
        left = f" {self._glyphs.dot} {clock(eta)} left" if eta is not None and state == "running" else ""
        line = Table.grid(expand=True)
        line.add_column()
        line.add_column(justify="right")
        title = Text.assemble(
            (f"{self._glyphs.mark} ", _MARKS.get(state, "yellow")),
            (self._name, "bold"),
            ("  " + state, _MARKS.get(state, "yellow")),
        )
        line.add_row(title, Text(elapsed + left, style="dim"))
        return line

    def _bar(self) -> RenderableType:
        step, steps = self._view.status.get("step", 0), self._view.status.get("steps", 0)
        line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        line.add_column(ratio=1)
        line.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(
            total=max(steps, 1), completed=step, style="grey23", complete_style="cyan", finished_style="green"
        )
        line.add_row(bar, Text.assemble("step ", (f"{step}", "bold"), f" of {steps}" if steps else ""))
        return line

    def _tasks(self) -> RenderableType:
        table = Table(box=None, expand=False, padding=(0, 2, 0, 0), header_style="dim")
        for title in ("task", "reward"):
            table.add_column(title, no_wrap=True)
        for title in (
            ("first", "now", "failed") if self._narrow else ("first", "now", "trajectories", "failed")
        ):
            table.add_column(title, justify="right", no_wrap=True)
        for name in self._view.tasks:
            rewards = self._view.rewards(name)
            counts = self._view.status.get("tasks", {}).get(name, {})
            ends = tenths(rewards)
            failed = counts.get("failed", 0)
            count = [] if self._narrow else [f"{counts.get('trajectories', 0):,}"]
            width = _SPARK_WIDTH // 3 if self._narrow else _SPARK_WIDTH
            table.add_row(
                Text(name, style="bold"),
                Text(sparkline(rewards, width, self._glyphs.blocks), style="cyan"),
                f"{ends[0]:.3f}" if ends else self._glyphs.none,
                _change(*ends) if ends else Text(self._glyphs.none),
                *count,
                Text(f"{failed:,}", style="yellow" if failed else "dim"),
            )
        return table

    def _note(self) -> Text | None:
        if self._stopping and not self._view.final:
            return Text(
                "stopping: the ranks finish what they hold; press Ctrl-C again to end them at once", "yellow"
            )
        silent = self._view.silent_s()
        if silent is not None and silent > _SILENT_AFTER_S:
            return Text(f"no news from the coordinator for {clock(silent)}", "yellow")
        if self._view.state == "starting" or not self._view.message:
            return None
        return Text(self._view.message, "dim")


def _figures(status: dict[str, Any], none: str, *, narrow: bool) -> RenderableType:
    """Return throughput and staleness on the left, where the time of a step goes on the right (or below)."""
    waits, staleness, groups = (status.get(key) or {} for key in ("waits", "staleness", "groups"))
    left = [
        ("tokens/s", f"{status.get('tokens_per_s') or 0:,.0f}"),
        ("staleness", f"mean {staleness['mean']:.2f}, max {staleness['max']}" if staleness else none),
        ("in flight", f"{status.get('in_flight', 0):,}"),
        ("groups", f"{groups.get('open', 0)} open, {groups.get('complete', 0)} complete"),
    ]
    right = [
        ("trainer waits for data", _seconds(waits.get("trainer_batch_s"), none)),
        ("training", _seconds(waits.get("trainer_train_s"), none)),
        ("publishing weights", _seconds(waits.get("publish_s"), none)),
        ("generators paused", _seconds(waits.get("exposed_s"), none)),
    ]
    rows = [*left, *right] if narrow else [a + b for a, b in zip(left, right, strict=True)]
    table = Table.grid(padding=(0, 3, 0, 0))
    for column in range(len(rows[0])):
        table.add_column(style="" if column % 2 else "dim", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _change(first: float, now: float) -> Text:
    style = "green" if now > first else "" if now == first else "yellow"
    return Text(f"{now:.3f}", style=style)


def _seconds(value: float | None, none: str) -> str:
    if value is None:
        return none
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"


# --- one line a step ---------------------------------------------------------------------------------


class PlainDisplay:
    """Lines of stable columns, for logs and pipes."""

    _HEAD = "       step   reward  tokens/s stale  wait s  train s publish s"

    def __init__(self, view: RunView, console: Console) -> None:
        self._view, self._console = view, console
        self._shown, self._stopping = 0, False

    def phase(self, text: str) -> None:
        """Print what is being waited for."""
        self._print(f"{text} ...")

    def update(self, *, stopping: bool = False) -> None:
        """Print the steps that are new."""
        if stopping and not self._stopping:
            self._stopping = True
            self._print("stopping ...")
        self._view.refresh()
        for line in self._view.steps[self._shown :]:
            if self._shown == 0:
                self._print(self._HEAD)
            self._shown += 1
            self._print(self._line(line))

    def close(self) -> None:
        """Print what is left."""
        self.update()

    def _line(self, line: dict[str, Any]) -> str:
        step = f"{line['step'] + 1}/{self._view.status.get('steps', '?')}"
        return (
            f"{step:>11} {_number(line, 'reward_mean', '.3f'):>8} {_number(line, 'tokens_per_s', ',.0f'):>9} "
            f"{_number(line, 'staleness_mean', '.2f'):>5} {_number(line, 'wait_batch_s', '.2f'):>7} "
            f"{_number(line, 'train_s', '.2f'):>8} {_number(line, 'publish_s', '.2f'):>9}"
        )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _number(line: dict[str, Any], key: str, form: str) -> str:
    value = line.get(key)
    return "-" if value is None else format(value, form)


# --- the end, and small things -----------------------------------------------------------------------


def summary(run_dir: Path, console: Console, report: Path | None) -> None:
    """Print how the reward changed from the first tenth of the steps to the last, and where to look."""
    view = RunView(run_dir)
    view.refresh()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("task")
    for title in ("first tenth", "last tenth", "change"):
        table.add_column(title, justify="right")
    for name in view.tasks:
        if ends := tenths(view.rewards(name)):
            table.add_row(name, f"{ends[0]:.3f}", f"{ends[1]:.3f}", f"{ends[1] - ends[0]:+.3f}")
    if table.row_count:
        console.print(Padding(table, (1, 2)))
    took = view.status.get("t", 0.0) - view.status.get("t_start", 0.0)
    rows = [("steps", str(len(view.steps))), ("wall time", clock(took)), ("run", str(run_dir))]
    rows += [("report", str(report))] if report else []
    for key, value in rows:
        console.print(f"  {key:<10} {value}", markup=False, highlight=False, soft_wrap=True)


def sparkline(values: Sequence[float], width: int, blocks: str = UNICODE.blocks) -> str:
    """Return `values` as `width` characters at most, each the mean of its share, scaled from low to high."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return blocks[0] * count
    top = len(blocks) - 1
    return "".join(blocks[round((mean - low) / (high - low) * top)] for mean in means)


def clock(seconds: float) -> str:
    """Return a duration as `0:07`, `12:40` or `3:05:10`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
