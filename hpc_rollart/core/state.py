"""What the ledger carries over from one attempt of a run to the next, as plain data.

Taken the instant batch N - 1 is cut, it goes into the checkpoint of step N. What was in flight then is lost
with the attempt: the groups that were open come back with their ids and seeds, and all their members that
were not given up wait to be dispatched. Times are not carried over, since each attempt has its own clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupState:
    """An open group; of each member the attempt that is to run and how often it failed."""

    id: int
    task: int
    env_seed: int
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LedgerState:
    """A ledger right after a batch was cut.

    Attributes
    ----------
    step
        Batches cut.
    next_group
        Id of the next group to be opened.
    groups
        Those that are open.
    credits, drops
        Of each task, its turn in the mix and its groups dropped in a row.
    owed
        Of each task, the groups of earlier batches that it did not get.
    counts
        Of each task, trajectories by final status, and `started`; those in flight are left out.
    """

    step: int
    next_group: int
    groups: tuple[GroupState, ...]
    credits: tuple[float, ...]
    drops: tuple[int, ...]
    owed: tuple[float, ...]
    counts: tuple[Mapping[str, int], ...]

    def plain(self) -> dict[str, Any]:
        """Return it as mappings, sequences and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "LedgerState":
        """Return what `plain` was made from, also after a trip through JSON.

        Raises
        ------
        ValueError
            Something is missing or of another kind.
        """
        try:
            return cls(
                step=int(plain["step"]),
                next_group=int(plain["next_group"]),
                groups=tuple(_group(group) for group in plain["groups"]),
                credits=tuple(float(credit) for credit in plain["credits"]),
                drops=tuple(int(drops) for drops in plain["drops"]),
                owed=tuple(float(owed) for owed in plain["owed"]),
                counts=tuple({name: int(n) for name, n in counts.items()} for counts in plain["counts"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no state of a ledger: {error!r}") from None

    def check(self, tasks: Sequence[object], members: int) -> None:
        """Raise ValueError unless it fits a ledger with these tasks and so many members a group."""
        sizes = {len(column) for column in (self.credits, self.drops, self.owed, self.counts)}
        if sizes != {len(tasks)}:
            raise ValueError(f"the state is of a run with {sizes.pop()} tasks, this one has {len(tasks)}")
        for group in self.groups:
            if not (0 <= group.id < self.next_group and 0 <= group.task < len(tasks)):
                raise ValueError(f"the state holds a group {group.id} of task {group.task}, which cannot be")
            if len(group.members) != members:
                raise ValueError(f"group {group.id} has {len(group.members)} members, groups have {members}")


def _group(plain: Mapping[str, Any]) -> GroupState:
    members = tuple((int(attempt), int(failures)) for attempt, failures in plain["members"])
    return GroupState(int(plain["id"]), int(plain["task"]), int(plain["env_seed"]), members)
