"""Which complete groups make the next batch: each task's share, and how long a slow task is waited for.

A batch of whatever is complete first would be a batch of the quickest task, and the groups of the others
would go stale beside it. So a task is due a part of every batch by its weight, and a batch that others could
fill waits for a task that is a whole group short. It does not wait for long: at most `rules.share_patience`
times as long as the batch has taken by then, and never longer than `rules.share_hold_max_s`. Nor often: no
task makes the others wait in vain for more than a twentieth of the time, and one that was waited for in vain
is not waited for again before it has completed a group. Nobody waits for the retry of what has failed.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil

from .types import Rules, Task

_ROUNDING = 1e-9

VAIN_PART = 0.05
"""Part of the time that the batches may spend waiting for a task that is then not there."""


@dataclass(slots=True)
class _Record:
    """How a task keeps up."""

    owed: float = 0.0  # groups of earlier batches: what it did not get, less what it had beyond its share
    vain_s: float = 0.0  # how long it has been waited for in vain
    delivered: bool = True  # whether it completed a group since


class BatchShares:
    """Chooses the groups of each batch; see the module.

    Parameters
    ----------
    tasks
        The mix; a batch is shared by weight among the tasks.
    rules
        `groups_per_batch`, `share_patience` and `share_hold_max_s` are read.
    """

    def __init__(self, tasks: Sequence[Task], rules: Rules) -> None:
        self._tasks = tuple(tasks)
        self._rules = rules
        self._records = [_Record() for _ in tasks]
        self._first: float | None = None  # when the first batch was asked for
        self._began = 0.0  # when the last batch was cut, or the first one asked for
        self._full_since: float | None = None  # when the trainer waited and this batch could first be cut
        self._held_for: list[int] = []

    def completed(self, task: int) -> None:
        """A group of the task is complete."""
        self._records[task].delivered = True

    @property
    def owed(self) -> tuple[float, ...]:
        """Groups that each task did not get in earlier batches, less what it had beyond its share."""
        return tuple(record.owed for record in self._records)

    def restore(self, owed: Sequence[float]) -> None:
        """Take over what an earlier attempt of the run still owed."""
        for record, groups in zip(self._records, owed, strict=True):
            record.owed = groups

    def choose(
        self,
        now: float,
        ready: Sequence[tuple[int, int, bool]],
        pending: Collection[int],
        awake: Sequence[int],
    ) -> list[int] | None:
        """Choose the groups of the next batch, or None while it is to wait.

        Parameters
        ----------
        ready
            Task and id of each complete group, and whether this is the last batch that may hold it; those to
            be consumed first in front.
        pending
            Tasks that have an incomplete group none of whose members has failed.
        awake
            Tasks that do not rest. One that rests is due a part only while it has complete groups, and is
            never waited for.
        """
        if self._first is None:
            self._first = self._began = now
        self._held_for = []
        if len(ready) < self._rules.groups_per_batch:
            self._full_since = None
            return None
        if self._full_since is None:
            self._full_since = now
        have = Counter(task for task, _, _ in ready)
        shares = self._shares({*awake, *have})
        due = {task: int(self._records[task].owed + share + _ROUNDING) for task, share in shares.items()}
        chosen, filler = self._fill(ready, due)
        # What a task missed earlier it gets once it is there; nobody waits for more than one batch's share.
        expected = {task: min(due[task], max(1, ceil(share - _ROUNDING))) for task, share in shares.items()}
        late = [
            task
            for task in awake
            if have[task] < expected[task] and task in pending and self._worth_waiting(task)
        ]
        if late and filler and now < self._deadline():
            self._held_for = late
            return None
        for task in late if filler else ():
            self._records[task].vain_s += now - self._full_since
            self._records[task].delivered = False
        self._settle(shares, Counter(task for task, _ in chosen))
        self._began, self._full_since = now, None
        return sorted(group for _, group in chosen)

    def next_wake(self, now: float) -> float | None:
        """When the batch that is held will have waited long enough; None if none is."""
        return self._deadline() if self._held_for and self._deadline() > now else None

    def describe(self, now: float) -> list[str]:
        """What the batch is held for, in words, if it is."""
        if not self._held_for:
            return []
        names = " and ".join(repr(self._tasks[task].name) for task in self._held_for)
        return [f"held for the share of {names}, for {max(0.0, self._deadline() - now):.1f} s more at most"]

    def _worth_waiting(self, task: int) -> bool:
        assert self._first is not None and self._full_since is not None
        record = self._records[task]
        return record.delivered and record.vain_s <= VAIN_PART * (self._full_since - self._first)

    def _deadline(self) -> float:
        assert self._full_since is not None
        patience = self._rules.share_patience * (self._full_since - self._began)
        return self._full_since + min(patience, self._rules.share_hold_max_s)

    def _shares(self, tasks: Collection[int]) -> dict[int, float]:
        """Groups of a batch by task, in proportion to weight."""
        total = sum(self._tasks[task].weight for task in tasks)
        size = self._rules.groups_per_batch
        return {task: self._tasks[task].weight / total * size for task in sorted(tasks)}

    def _fill(
        self, ready: Sequence[tuple[int, int, bool]], due: dict[int, int]
    ) -> tuple[list[tuple[int, int]], int]:
        """Choose (task, group) for a whole batch, and count those that took the place of others' shares.

        What would go stale otherwise comes first, then what each task is due, then whatever is next in line.
        """
        left = Counter(due)
        ranked = []
        for task, group, last in sorted(ready, key=lambda entry: not entry[2]):
            ranked.append((not last, left[task] <= 0, task, group))
            left[task] -= 1
        chosen = sorted(ranked, key=lambda entry: entry[:2])[: self._rules.groups_per_batch]
        filler = sum(may_wait and beyond for may_wait, beyond, _, _ in chosen)
        return [(task, group) for _, _, task, group in chosen], filler

    def _settle(self, shares: dict[int, float], taken: Counter[int]) -> None:
        """Carry over what each task is owed, at most for one batch, so that none bursts after a gap."""
        for task, record in enumerate(self._records):
            share = shares.get(task, 0.0)
            bound = max(1.0, share)
            record.owed = max(-bound, min(bound, record.owed + share - taken[task]))
