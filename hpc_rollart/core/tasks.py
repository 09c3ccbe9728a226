"""Which task the next group gets: smooth weighted round robin over the tasks that are fit to run."""

from collections.abc import Sequence
from math import ceil

from .types import Rules, Task


class TaskMix:
    """The shares of the tasks, and which of them rest after failures.

    A task *rests* when one of its groups had to be dropped because members kept failing: for
    `rules.backoff`, doubled by each further drop; meanwhile the other tasks share its share. A complete
    group shows that the task works again: it ends the rest and the streak.

    No task holds more open groups than its share of the window (rounded up, at least one), so that one that
    hangs cannot fill the window and stop the others.
    """

    def __init__(self, tasks: Sequence[Task], rules: Rules) -> None:
        if not tasks:
            raise ValueError("at least one task is needed")
        self._tasks = tuple(tasks)
        self._rules = rules
        self._credit = [0.0] * len(tasks)
        self._drops = [0] * len(tasks)
        self._rest_until = [float("-inf")] * len(tasks)
        self._last_reason = [""] * len(tasks)
        self.open = [0] * len(tasks)

    def awake(self, now: float) -> list[int]:
        """Tasks that do not rest."""
        return [i for i, until in enumerate(self._rest_until) if until <= now]

    def eligible(self, now: float, room: int) -> list[int]:
        """Tasks that neither rest nor hold their share of `room` groups.

        The caps of the tasks that do not rest add up to at least `room`, so while fewer than `room` groups
        are open this is empty only if all tasks rest.
        """
        awake = self.awake(now)
        weight = sum(self._tasks[i].weight for i in awake)
        return [i for i in awake if self.open[i] < max(1, ceil(self._tasks[i].weight / weight * room))]

    def take(self, now: float, room: int) -> int | None:
        """Choose the task of a new group and count the group as open; None if no task is eligible."""
        eligible = self.eligible(now, room)
        if not eligible:
            return None
        # A task that is passed over gains no credit, so it does not burst when it is back.
        for i in eligible:
            self._credit[i] += self._tasks[i].weight
        chosen = max(eligible, key=lambda i: (self._credit[i], -i))
        self._credit[chosen] -= sum(self._tasks[i].weight for i in eligible)
        self.open[chosen] += 1
        return chosen

    def close(self, task: int) -> None:
        """One of the task's groups was consumed or dropped."""
        self.open[task] -= 1

    def failed(self, task: int, reason: str) -> None:
        """Remember why a trajectory of the task failed, for messages."""
        self._last_reason[task] = reason

    def rest(self, task: int, now: float) -> None:
        """A group of the task was given up: admit no other before the back-off is over."""
        self._drops[task] += 1
        self._rest_until[task] = now + self._rules.backoff(self._drops[task])

    def succeeded(self, task: int) -> None:
        """A group of the task is complete: it works."""
        self._drops[task] = 0
        self._rest_until[task] = float("-inf")

    def next_wake(self, now: float) -> float | None:
        """When the first resting task wakes; None if none rests."""
        return min((until for until in self._rest_until if until > now), default=None)

    @property
    def credits(self) -> tuple[float, ...]:
        """Each task's turn."""
        return tuple(self._credit)

    @property
    def drops(self) -> tuple[int, ...]:
        """Each task's groups that had to be dropped, in a row."""
        return tuple(self._drops)

    def restore(self, credits: Sequence[float], drops: Sequence[int], open_tasks: Sequence[int]) -> None:
        """Go on where another mix was, with one open group of each of `open_tasks`; no task rests."""
        self._credit, self._drops = list(credits), list(drops)
        self.open = [open_tasks.count(task) for task in range(len(self._tasks))]

    def describe(self, now: float) -> list[str]:
        """One phrase for each task that rests or last failed."""
        phrases = []
        for task, until, reason in zip(self._tasks, self._rest_until, self._last_reason, strict=True):
            rests = f"rests for {until - now:.1f} s more" if until > now else ""
            failed = f"last failure: {reason}" if reason else ""
            if rests or failed:
                phrases.append(f"task {task.name!r} " + "; ".join(filter(None, (rests, failed))))
        return phrases
