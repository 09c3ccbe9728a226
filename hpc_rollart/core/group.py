"""A group: the members dispatched from one environment seed, and where each of them stands."""

from dataclasses import dataclass, field
from enum import Enum

from .state import GroupState
from .types import GroupView


class State(Enum):
    """Where a member stands; it has a trajectory while RUNNING or FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    OUT = "out"  # given up after too many failures, or not needed any more


@dataclass(slots=True)
class Member:
    """One of the places of a group; a replacement takes the same place with the next `attempt`."""

    index: int
    state: State = State.WAITING
    attempt: int = 0
    failures: int = 0
    trajectory: int = -1
    since: float = 0.0
    start_version: int | None = None
    reward: float = 0.0

    @property
    def held(self) -> bool:
        """Whether a trajectory of this member is in flight or finished."""
        return self.state in (State.RUNNING, State.FINISHED)

    def run(self, trajectory: int, now: float) -> None:
        """A trajectory was dispatched for this member."""
        self.state, self.trajectory, self.since, self.start_version = State.RUNNING, trajectory, now, None

    def wait(self) -> None:
        """The member's trajectory came to nothing: another attempt is to be dispatched."""
        self.state, self.trajectory, self.start_version = State.WAITING, -1, None
        self.attempt += 1

    def give_up(self) -> None:
        """No trajectory will be dispatched for this member any more."""
        self.state, self.trajectory, self.start_version = State.OUT, -1, None


@dataclass(slots=True)
class Group:
    """An open group: admitted, neither consumed nor dropped. `size` finished members make it complete."""

    id: int
    task: int
    size: int
    env_seed: int
    members: list[Member] = field(default_factory=list)

    def in_state(self, state: State) -> list[Member]:
        """Members in that state, by index."""
        return [member for member in self.members if member.state is state]

    @property
    def finished(self) -> int:
        """How many members finished."""
        return [member.state for member in self.members].count(State.FINISHED)

    @property
    def complete(self) -> bool:
        """Whether the group can be consumed as it is."""
        return self.finished == self.size

    @property
    def possible(self) -> bool:
        """Whether enough members are left to complete the group."""
        return sum(member.state is not State.OUT for member in self.members) >= self.size

    @property
    def start_version(self) -> int | None:
        """The version that sampled the group's oldest first token; None before any."""
        return min((m.start_version for m in self.members if m.start_version is not None), default=None)

    @property
    def troubled(self) -> bool:
        """Whether a member has failed, so that its replacement may be long in coming."""
        return any(member.failures for member in self.members)

    def too_old(self, oldest: int) -> list[Member]:
        """Members whose trajectory started before version `oldest`."""
        return [m for m in self.members if m.start_version is not None and m.start_version < oldest]

    def worth_keeping(self, oldest: int) -> bool:
        """Whether at least as many trajectories are held that are valid as are too old.

        Replacing the few keeps the work of the many. Replacing the many to save the few does not: the few are
        the older ones of the renewed group and would be the next to become stale.
        """
        stale = len(self.too_old(oldest))
        return sum(member.held for member in self.members) - stale >= stale

    def progress(self, oldest: int) -> tuple[bool, int, int, int, int]:
        """Sort key, the least progressed group first.

        That is one not worth keeping; then by valid members finished, started and held; then the youngest.
        """
        fresh = [m for m in self.members if m.held and (m.start_version is None or m.start_version >= oldest)]
        finished = sum(m.state is State.FINISHED for m in fresh)
        started = sum(m.start_version is not None for m in fresh)
        return self.worth_keeping(oldest), finished, started, len(fresh), -self.id

    def lacks(self, now: float) -> str:
        """What the group waits for, in words."""
        running = self.in_state(State.RUNNING)
        if not running:
            return f"{len(self.in_state(State.WAITING))} to be dispatched"
        oldest = min(running, key=lambda member: member.since)
        version = oldest.start_version
        began = "has sampled no token" if version is None else f"started at version {version}"
        return (
            f"{len(running)} in flight, longest trajectory {oldest.trajectory} "
            f"(for {now - oldest.since:.1f} s, {began})"
        )

    def state(self) -> GroupState:
        """What is left of the group when everything in flight is lost."""
        members = tuple((member.attempt, member.failures) for member in self.members)
        return GroupState(self.id, self.task, self.env_seed, members)

    @staticmethod
    def restored(saved: GroupState, retry_attempts: int) -> list[Member]:
        """Members as `state` saved them: waiting, or given up after `retry_attempts` failures.

        One that was not needed any more waits, too, since those that had finished are lost.
        """
        members = []
        for index, (attempt, failures) in enumerate(saved.members):
            members.append(Member(index, attempt=attempt, failures=failures))
            if failures >= retry_attempts:
                members[-1].give_up()
        return members

    def view(self) -> GroupView:
        """What a display shows of the group."""
        states = [member.state for member in self.members]
        return GroupView(
            group=self.id,
            task=self.task,
            finished=states.count(State.FINISHED),
            running=states.count(State.RUNNING),
            waiting=states.count(State.WAITING),
            complete=self.complete,
            start_version=self.start_version,
        )
