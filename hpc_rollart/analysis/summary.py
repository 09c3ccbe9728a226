"""Boils a run down to the numbers that one asks for first: did it learn, how fast, how cleanly."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_rollart.analysis.rundir import RunDir
from hpc_rollart.store.reader import RunData

# Differences smaller than this many standard errors are called no change.
CLEAR = 2.0


@dataclass(frozen=True)
class Verdict:
    """What became of one task: mean reward over the first and the last tenth of the steps.

    Attributes
    ----------
    error
        Standard error of `last` − `first`, over groups (trajectories of a group are not independent: they
        share their environment's seed); NaN when there are too few.
    word
        ``improved``, ``fell``, ``no clear change`` or ``too short to say``.
    """

    task: str
    first: float
    last: float
    error: float
    trajectories: int
    word: str


@dataclass(frozen=True)
class Failure:
    """Trajectories of one task that ended alike without being trained on."""

    task: str
    status: str
    stop: str
    count: int
    share: float
    reason: str


@dataclass(frozen=True)
class Summary:
    """Headline numbers; NaN or None where the run has nothing to tell.

    Attributes
    ----------
    trained_tokens
        Sampled tokens of consumed trajectories.
    statuses
        Rows by status, `ok` split into ``trained``, ``rolled back`` (trained on after an attempt's last
        checkpoint, and lost with it) and ``ok, not trained``.
    staleness
        Consumed trajectories by staleness.
    """

    steps: int
    steps_planned: int | None
    wall_s: float
    trajectories: int
    trained: int
    tokens: int
    trained_tokens: int
    statuses: dict[str, int]
    staleness: dict[int, int]
    verdicts: list[Verdict]
    failures: list[Failure]

    @property
    def max_staleness(self) -> int | None:
        """The largest staleness that was trained on."""
        return max(self.staleness, default=None)

    @property
    def sentence(self) -> str:
        """The verdicts in one sentence."""
        if not self.verdicts:
            return "Nothing was trained on yet."
        words = Counter(verdict.word for verdict in self.verdicts)
        total = len(self.verdicts)
        if words["improved"] == total:
            every = {1: "", 2: " on both tasks"}.get(total, f" on all {total} tasks")
            return f"Reward improved{every}."
        if words["too short to say"] == total:
            return "Too few steps to say whether the reward changed."
        parts = [f"{word} on {count}" for word, count in words.items()]
        return f"Reward: {', '.join(parts)} of {total} task{'s' if total > 1 else ''}."


def summarise(run: RunDir) -> Summary:
    """Compute the headline numbers of `run` from its shards, batch logs and metrics."""
    if run.data is None:
        return Summary(0, run.config.get("run", {}).get("steps"), _wall(run), 0, 0, 0, 0, {}, {}, [], [])
    consumed, found, rows = run.data.consumed_rows()
    all_rows = run.data.trajectories()
    trained = np.isin(all_rows["trajectory"], consumed["trajectory"])
    rolled_back = np.isin(all_rows["trajectory"], run.data.rolled_back()["trajectory"])
    statuses = {"trained": int(trained.sum())} if len(all_rows) else {}
    if rolled_back.any():
        statuses["rolled back"] = int(rolled_back.sum())
    for code, name in enumerate(run.data.statuses):
        count = int(((all_rows["status"] == code) & ~trained & ~rolled_back).sum())
        if count:
            statuses["ok, not trained" if name == "ok" else name] = count
    return Summary(
        steps=len(np.unique(consumed["step"])),
        steps_planned=run.config.get("run", {}).get("steps"),
        wall_s=_wall(run),
        trajectories=len(all_rows),
        trained=int(trained.sum()),
        tokens=int(all_rows["token_count"].sum()),
        trained_tokens=_sampled(run.data, consumed["trajectory"]),
        statuses=statuses,
        staleness=dict(sorted(Counter(consumed["staleness"].tolist()).items())),
        verdicts=_verdicts(run.data.tasks, consumed[found], rows[found]),
        failures=_failures(run, all_rows),
    )


def _sampled(data: RunData, trajectories: NDArray[np.uint64]) -> int:
    total = 0
    for shard in data:
        turns = shard.turns()
        total += int(turns["sampled_count"][np.isin(turns["trajectory"], trajectories)].sum())
    return total


def _wall(run: RunDir) -> float:
    if "t" in run.status and "t_start" in run.status:
        return float(run.status["t"]) - float(run.status["t_start"])
    if run.data is not None and len(rows := run.data.trajectories()):
        return float(np.nanmax(rows["t_finished"]) - np.nanmin(rows["t_admitted"]))
    return math.nan


def _verdicts(tasks: list[str], consumed: NDArray[Any], rows: NDArray[Any]) -> list[Verdict]:
    steps = np.unique(consumed["step"])
    tenth = max(1, len(steps) // 10)
    verdicts = []
    for task, name in enumerate(tasks):
        mine = rows["task"] == task
        if not mine.any():
            continue
        # A task's own first and last tenth: a rare task is not in every step.
        own = np.unique(consumed["step"][mine])
        span = max(1, min(tenth, len(own) // 2))
        first = _group_means(rows[mine & np.isin(consumed["step"], own[:span])])
        last = _group_means(rows[mine & np.isin(consumed["step"], own[-span:])])
        delta = float(last.mean() - first.mean())
        few = min(len(first), len(last)) < 2 or len(own) < 2
        error = math.nan if few else math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
        if few or len(steps) < 10:
            word = "too short to say"
        elif abs(delta) <= CLEAR * error:
            word = "no clear change"
        else:
            word = "improved" if delta > 0 else "fell"
        verdicts.append(Verdict(name, float(first.mean()), float(last.mean()), error, int(mine.sum()), word))
    return verdicts


def _group_means(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Mean reward of each group; groups are of one size, so their mean is that of the trajectories."""
    _, group = np.unique(rows["group"], return_inverse=True)
    return np.bincount(group, rows["reward"]) / np.bincount(group)


def _failures(run: RunDir, rows: NDArray[Any]) -> list[Failure]:
    """All rows that are not `ok`, by task, status and stop; with the first one's reason as an example."""
    assert run.data is not None
    data = run.data
    failures = []
    lost = rows[rows["status"] != data.statuses.index("ok")]
    kinds, firsts, counts = np.unique(lost[["task", "status", "stop"]], return_index=True, return_counts=True)
    for kind, first, count in zip(kinds, firsts, counts, strict=True):
        info = data.text_of(int(lost["trajectory"][first]))["info"]
        failures.append(
            Failure(
                task=data.tasks[kind["task"]],
                status=data.statuses[kind["status"]],
                stop=data.stops[kind["stop"]],
                count=int(count),
                share=count / int((rows["task"] == kind["task"]).sum()),
                reason=str(info.get("reason") or info.get("error") or ""),
            )
        )
    return sorted(failures, key=lambda failure: -failure.count)
