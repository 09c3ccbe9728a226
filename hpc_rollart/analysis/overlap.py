"""Measures from the timelines how much of generation ran while the trainer trained or weights moved.

The paper's point (ROLLART, sections 4 and 5) is that rollout, training and weight transfer hide each
other; this is the number that says whether they did.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_rollart.analysis.rundir import Rank
from hpc_rollart.observe.trace import Event, read_timelines

# Where spans of one rank overlap, the time goes to the first of these: useful work before waiting.
PRIORITY = ("train", "generate", "weights", "env", "store", "wait")

# What each rank records as an attempt of the run begins.
MARKER = "attempt"

Intervals = NDArray[np.float64]
"""Disjoint intervals in order, shape (N, 2): start and end in seconds."""


def union(events: Iterable[Event]) -> Intervals:
    """The time covered by at least one of `events`."""
    return merge(np.array([(event.t, event.end) for event in events], np.float64).reshape(-1, 2))


def merge(*parts: Intervals) -> Intervals:
    """Union of any intervals, of shape (N, 2) each, overlapping or not."""
    spans = np.concatenate(parts)
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    begins = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    lasts = np.concatenate([begins[1:], [True]])
    return np.stack([spans[begins, 0], reach[lasts]], axis=1)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The time covered by both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if start < end:
            found.append((start, end))
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    return np.array(found, np.float64).reshape(-1, 2)


def seconds(intervals: Intervals) -> float:
    """Total length."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


@dataclass(frozen=True)
class Overlap:
    """All times in seconds; a generator's own time counts once for each generator rank.

    Attributes
    ----------
    wall_s
        First event of any rank to the last, without the time between attempts.
    generate_s, overlapped_s
        Time that generators were busy decoding, and the part of it while the trainer trained or weights
        were on their way anywhere (snapshot, broadcast, stage, install, recompute).
    overlapped_train_s, overlapped_weights_s
        That part split; time that is both counts in both.
    train_s, weights_s
        Time that the trainer trained, and that weights were on their way.
    exposed_s
        Time that generators stood still to install weights, and to recompute KV caches.
    generators
        Busy and overlapped seconds of each generator rank.
    """

    wall_s: float = 0.0
    generate_s: float = 0.0
    overlapped_s: float = 0.0
    overlapped_train_s: float = 0.0
    overlapped_weights_s: float = 0.0
    train_s: float = 0.0
    weights_s: float = 0.0
    exposed_s: float = 0.0
    generators: dict[Rank, tuple[float, float]] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        """Share of generation that ran under training or weight transfer; NaN without generation."""
        return self.overlapped_s / self.generate_s if self.generate_s else float("nan")


def attempts(timelines: dict[Rank, list[Event]]) -> Intervals:
    """From the first thing done to the last, of each attempt of the run; a marker tells where one begins.

    Between two attempts a job may have waited in the queue for days.
    """
    events = [event for found in timelines.values() for event in found]
    begun: dict[int, float] = {}
    for event in events:
        if event.name == MARKER:
            number = event.args["attempt"]
            begun[number] = min(event.t, begun.get(number, event.t))
    times = np.array([(event.t, event.end) for event in events if event.name != MARKER]).reshape(-1, 2)
    which = np.searchsorted(sorted(begun.values())[1:], times[:, 0], side="right")
    spans = [(times[which == i, 0].min(), times[which == i, 1].max()) for i in np.unique(which)]
    return merge(np.array(spans).reshape(-1, 2))


def measure(timelines: dict[Rank, list[Event]]) -> Overlap:
    """Compute the overlap of a run's `timelines`."""
    events = [event for rank in timelines.values() for event in rank]
    if not events:
        return Overlap()
    train = union(event for event in events if event.cat == "train")
    weights = union(event for event in events if event.cat == "weights")
    covered = merge(train, weights)
    busy = {
        rank: union(event for event in found if event.cat == "generate") for rank, found in timelines.items()
    }
    busy = {rank: intervals for rank, intervals in busy.items() if len(intervals)}
    generators = {
        rank: (seconds(intervals), seconds(intersect(intervals, covered))) for rank, intervals in busy.items()
    }
    return Overlap(
        wall_s=seconds(attempts(timelines)),
        generate_s=sum(total for total, _ in generators.values()),
        overlapped_s=sum(overlapped for _, overlapped in generators.values()),
        overlapped_train_s=sum(seconds(intersect(intervals, train)) for intervals in busy.values()),
        overlapped_weights_s=sum(seconds(intersect(intervals, weights)) for intervals in busy.values()),
        train_s=seconds(train),
        weights_s=seconds(weights),
        exposed_s=sum(
            event.d for rank in busy for event in timelines[rank] if event.name in ("install", "recompute")
        ),
        generators=generators,
    )


def overlap(run_dir: Path) -> Overlap:
    """Compute the overlap of the run in `run_dir`."""
    return measure(read_timelines(run_dir))


def time_by_category(timelines: dict[Rank, list[Event]]) -> dict[Rank, dict[str, float]]:
    """Where each rank's time went, in seconds by category.

    Every instant between the first event of an attempt and its last counts once: for the foremost category
    (see `PRIORITY`) that covers it, or as ``idle``.
    """
    events = [event for rank in timelines.values() for event in rank]
    if not events:
        return {}
    wall = seconds(attempts(timelines))
    found = {}
    for rank, own in timelines.items():
        covered: Intervals = np.empty((0, 2))
        times = {}
        for category in PRIORITY:
            before = seconds(covered)
            covered = merge(covered, union(event for event in own if event.cat == category))
            times[category] = seconds(covered) - before
        times["idle"] = max(0.0, wall - seconds(covered))
        found[rank] = times
    return found
