"""Which complete groups make the next batch: each task's share, and how long a slow task is waited for.

A batch of whatever is complete first would be a batch of the quickest task, and the groups of the others
would go stale beside it. So the seats of a batch are given to the tasks by weight, and a batch that others
could fill waits for a task that is short of its seats. It does not wait for long: at most
`rules.share_patience` times as long as the batch has taken by then. Nor often: a task that was waited for in
vain is not waited for in the next 2, 4, 8, ... batches, nor before it has completed another group.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .types import Rules, Task


@dataclass(slots=True)
class _Record:
    """How a task keeps up."""

    credit: float = 0.0  # seats it is owed, for want of fractions of a seat
    vain: int = 0  # waits in vain since it last filled its seats
    retry_step: int = 0
    delivered: bool = True

    def waited_for(self, step: int) -> bool:
        return self.vain == 0 or (self.delivered and step >= self.retry_step)


class BatchShares:
    """Chooses the groups of each batch; see the module.

    Parameters
    ----------
    tasks
        The mix; seats are shared by weight among the tasks that do not rest.
    rules
        `groups_per_batch` is the number of seats.
    """

    def __init__(self, tasks: Sequence[Task], rules: Rules) -> None:
        self._tasks = tuple(tasks)
        self._rules = rules
        self._records = [_Record() for _ in tasks]
        self._began: float | None = None  # when the last batch was cut, or the first one asked for
        self._full_since: float | None = None  # since when others could fill the next one
        self._held_for: list[int] = []

    def completed(self, task: int) -> None:
        """A group of the task is complete."""
        self._records[task].delivered = True

    def choose(
        self,
        step: int,
        now: float,
        ready: Sequence[tuple[int, int]],
        pending: Collection[int],
        awake: Sequence[int],
    ) -> list[int] | None:
        """Choose the groups of batch `step`, or None while it is to wait.

        Parameters
        ----------
        ready
            Task and id of each complete group, those to be consumed first in front.
        pending
            Tasks that have an open group that is not complete.
        awake
            Tasks that do not rest; only they have seats.
        """
        if self._began is None:
            self._began = now
        self._held_for = []
        if len(ready) < self._rules.groups_per_batch:
            return None
        if self._full_since is None:
            self._full_since = now
        seats, credits = self._seats(awake)
        have = Counter(task for task, _ in ready)
        late = [
            task
            for task, count in seats.items()
            if have[task] < count and task in pending and self._records[task].waited_for(step)
        ]
        if late and now < self._deadline():
            self._held_for = late
            return None
        for task, record in enumerate(self._records):
            record.credit = credits[task]
            if task in late:
                record.vain += 1
                record.retry_step = step + 1 + 2 ** min(record.vain, 30)
                record.delivered = False
            elif have[task] >= seats[task] > 0:
                record.vain = 0
        self._began, self._full_since = now, None
        return self._fill(seats, ready)

    def next_wake(self, now: float) -> float | None:
        """When the batch that is held will have waited long enough; None if none is."""
        return self._deadline() if self._held_for and self._deadline() > now else None

    def describe(self, now: float) -> list[str]:
        """What the batch is held for, in words, if it is."""
        if not self._held_for:
            return []
        names = " and ".join(repr(self._tasks[task].name) for task in self._held_for)
        return [f"held for the share of {names}, for {max(0.0, self._deadline() - now):.1f} s more at most"]

    def _deadline(self) -> float:
        assert self._began is not None and self._full_since is not None
        return self._full_since + self._rules.share_patience * (self._full_since - self._began)

    def _seats(self, awake: Sequence[int]) -> tuple[Counter[int], list[float]]:
        """Give out the seats by smooth weighted round robin, and the credits that are left after it."""
        credits = [record.credit for record in self._records]
        total = sum(self._tasks[task].weight for task in awake)
        seats: Counter[int] = Counter()
        for _ in range(self._rules.groups_per_batch if awake else 0):
            for task in awake:
                credits[task] += self._tasks[task].weight / total
            seat = max(awake, key=lambda task: (credits[task], -task))
            credits[seat] -= 1.0
            seats[seat] += 1
        return seats, credits

    def _fill(self, seats: Counter[int], ready: Sequence[tuple[int, int]]) -> list[int]:
        """Take each task's seats, and for those that a task leaves empty the groups that are next in line."""
        left = Counter(seats)
        own: list[int] = []
        others: list[int] = []
        for task, group in ready:
            left[task] -= 1
            (own if left[task] >= 0 else others).append(group)
        return sorted(own + others[: self._rules.groups_per_batch - len(own)])
