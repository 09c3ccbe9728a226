"""The life of trajectories and groups: what is admitted, what is cancelled, what is trained on.

Takes events and times, returns decisions. Three invariants live here:

1. *Staleness.* A trajectory that started at version b is consumed only by a batch trained from a version
   n <= b + alpha. Enforced at admission (`window`), in flight (each `cut_batch` cancels what can no longer be
   consumed) and at consumption.
2. A trajectory is consumed at most once, and only in a complete group of exactly `group_size`.
3. A failure is not a reward: a failed member is replaced, its group goes on without it.

**Which status wins.** Each dispatched trajectory ends in exactly one status, and the ledger is where that
is decided: `ok` when `cut_batch` returns it, `stale` or `surplus` when a `Cancel` for it is returned, else
that of `failed`. Messages cross, so a trajectory that was cancelled may still report that it started,
finished or failed; the ledger's cancel wins and the report is ignored.
"""

from collections import Counter
from collections.abc import Sequence

from . import seeds, window
from .group import Group, Member, State
from .shares import BatchShares
from .state import LedgerState
from .tasks import TaskMix
from .types import (
    FAILURES,
    STATUSES,
    Admission,
    Batch,
    BatchItem,
    Cancel,
    Dropped,
    Failure,
    Rules,
    Snapshot,
    Status,
    Task,
)
from .waiting import Place, WaitingList


class Ledger:
    """The rules of a run as a state machine; not thread-safe, never blocks, reads no clock.

    The driver calls `admit` after every event that may have made room and `cut_batch` whenever the trainer
    waits for a batch, both also at `next_wakeup`. All methods cost O(open groups), however long the run.

    Parameters
    ----------
    rules
        Sizes, staleness bound, redundancy and retries.
    tasks
        The mix; `Admission.task` and `BatchItem.task` index it.
    state
        What `state` returned in an earlier attempt of the run, to go on from.
    first_trajectory
        Id of the first trajectory; those that follow count up from it.

    Attributes
    ----------
    step
        Batches cut so far (c); the next batch is trained from the version of the same number.
    version
        Lowest version installed over the living generators (v).

    Raises
    ------
    ValueError
        The state is not that of such a run.
    """

    def __init__(
        self,
        rules: Rules,
        tasks: Sequence[Task],
        *,
        state: LedgerState | None = None,
        first_trajectory: int = 0,
    ) -> None:
        self.rules = rules
        self.tasks = tuple(tasks)
        self.step = 0
        self.version = 0
        self._mix = TaskMix(self.tasks, rules)
        self._shares = BatchShares(self.tasks, rules)
        self._waiting = WaitingList(self._wanted)
        # By id: the open groups, and the trajectories that are in flight or finished but not consumed.
        self._groups: dict[int, Group] = {}
        self._held: dict[int, tuple[Group, Member]] = {}
        self._next_group = 0
        self._first_trajectory = self._next_trajectory = first_trajectory
        self._counts: list[Counter[str]] = [Counter() for _ in self.tasks]
        self._closed = False
        if state is not None:
            self._restore(state)

    # --- admission -----------------------------------------------------------------------------

    def admit(self, now: float, free_slots: int) -> list[Admission]:
        """Dispatch up to `free_slots` trajectories: waiting members, then new groups as there is room."""
        admissions: list[Admission] = []
        while len(admissions) < free_slots and not self._closed:
            place = self._waiting.pop(now)
            if place is not None:
                admissions.append(self._dispatch(place, now))
            elif not self._open_group(now):
                break
        return admissions

    def next_wakeup(self, now: float) -> float | None:
        """The first instant after `now` at which more may be done without an event; None if there is none.

        What is due already and only lacks a slot is no reason to wake.
        """
        instants = [self._waiting.next_due(now), self._shares.next_wake(now)]
        if len(self._groups) < self._room():
            instants.append(self._mix.next_wake(now))
        return None if self._closed else min((t for t in instants if t is not None), default=None)

    def _room(self) -> int:
        return window.window_groups(self.rules, self.step, self.version)

    def _oldest(self) -> int:
        """The oldest start version that the next batch may hold."""
        return self.step - self.rules.alpha

    def _open_group(self, now: float) -> bool:
        room = self._room()
        if len(self._groups) >= room:
            return False
        task = self._mix.take(now, room)
        if task is None:
            return False
        env_seed = seeds.env_seed(self.rules.seed, self._next_group)
        group = Group(self._next_group, task, self.rules.group_size, env_seed)
        self._next_group += 1
        self._fill(group, [Member(index) for index in range(self._members)])
        return True

    @property
    def _members(self) -> int:
        return self.rules.group_size + self.rules.redundant_members

    def _fill(self, group: Group, members: list[Member]) -> None:
        self._groups[group.id] = group
        group.members += members
        for member in group.in_state(State.WAITING):
            self._waiting.add(Place(group.id, member.index, member.attempt))

    def _wanted(self, place: Place) -> bool:
        group = self._groups.get(place.group)
        if group is None:
            return False
        member = group.members[place.member]
        return member.state is State.WAITING and member.attempt == place.attempt

    def _dispatch(self, place: Place, now: float) -> Admission:
        group = self._groups[place.group]
        member = group.members[place.member]
        trajectory = self._next_trajectory
        self._next_trajectory += 1
        member.run(trajectory, now)
        self._held[trajectory] = (group, member)
        self._counts[group.task]["started"] += 1
        return Admission(
            trajectory=trajectory,
            group=group.id,
            member=member.index,
            attempt=member.attempt,
            task=group.task,
            env_seed=group.env_seed,
            sample_seed=seeds.sample_seed(self.rules.seed, group.id, member.index, member.attempt),
        )

    # --- what becomes of a trajectory ----------------------------------------------------------

    def started(self, trajectory: int, version: int) -> list[Cancel]:
        """The trajectory's first token was sampled under `version`.

        Usually returns nothing; the trajectory is cancelled if a batch cut meanwhile makes it stale.
        """
        held = self._find(trajectory)
        if held is None:
            return []
        group, member = held
        self._set_start(member, version)
        return self._purge(group)

    def finished(self, trajectory: int, reward: float, start_version: int) -> list[Cancel]:
        """The trajectory ended and was scored. The `group_size`-th to finish completes its group.

        `start_version` is repeated here because this report may overtake that of `started`.

        Raises
        ------
        ValueError
            If the reward is not finite (report that as a `reward_failed`), the version contradicts what was
            reported before, or the trajectory finished before.
        """
        held = self._find(trajectory)
        if held is None:
            return []
        group, member = held
        if member.state is State.FINISHED:
            raise ValueError(f"trajectory {trajectory} was reported finished twice")
        if not abs(reward) < float("inf"):
            raise ValueError(f"trajectory {trajectory}: reward {reward} is not finite")
        self._set_start(member, start_version)
        if start_version < self._oldest():
            return self._purge(group)
        member.state, member.reward = State.FINISHED, reward
        if not group.complete:
            return []
        self._mix.succeeded(group.task)
        self._shares.completed(group.task)
        cancels = [self._cancel(other, "surplus") for other in group.in_state(State.RUNNING)]
        for other in group.members:
            if other.state is not State.FINISHED:
                other.give_up()
        return cancels

    def failed(self, trajectory: int, status: Failure, reason: str, now: float) -> list[Cancel]:
        """The trajectory failed. Its member is dispatched again after a back-off, or given up.

        A group too many of whose members are given up is dropped, and its task rests.
        """
        if status not in FAILURES:
            raise ValueError(f"status of a failure must be one of {FAILURES}, not {status!r}")
        held = self._find(trajectory)
        if held is None:
            return []
        group, member = held
        self._end(trajectory, status)
        self._mix.failed(group.task, reason)
        member.failures += 1
        if member.failures < self.rules.retry_attempts:
            member.wait()
            due = now + self.rules.backoff(member.failures)
            self._waiting.add_later(due, Place(group.id, member.index, member.attempt))
            return []
        member.give_up()
        if group.possible:
            return []
        self._mix.rest(group.task, now)
        return self._drop(group)

    def _find(self, trajectory: int) -> tuple[Group, Member] | None:
        if not self._first_trajectory <= trajectory < self._next_trajectory:
            raise ValueError(f"trajectory {trajectory} was never admitted")
        return self._held.get(trajectory)

    def _set_start(self, member: Member, version: int) -> None:
        if not 0 <= version <= self.step:
            raise ValueError(f"trajectory {member.trajectory}: no version {version} yet at step {self.step}")
        if member.start_version not in (None, version):
            raise ValueError(
                f"trajectory {member.trajectory} was reported to start at version {member.start_version}, "
                f"and now at {version}"
            )
        member.start_version = version

    # --- weights -------------------------------------------------------------------------------

    def installed(self, version: int) -> None:
        """`version` is now the lowest that any living generator serves.

        Raises
        ------
        ValueError
            If it goes backwards, or is a version that no batch cut so far can have made.
        """
        if not self.version <= version <= self.step:
            raise ValueError(f"installed version {version} is not within [{self.version}, {self.step}]")
        self.version = version

    def may_install(self, version: int) -> bool:
        """Whether generators may install `version`. Once true it may be told to all of them.

        Always true but in `one_off` mode, where a trajectory is sampled by one version from end to end: the
        version before must be installed everywhere, and all the groups it is to make must have been admitted
        and be complete. That leaves nothing to admit before `version` is installed.
        """
        if self.rules.mode != "one_off" or version <= self.version:
            return True
        drained = len(self._groups) >= self._room() and all(group.complete for group in self._groups.values())
        return drained and version == self.version + 1

    # --- batches -------------------------------------------------------------------------------

    def cut_batch(self, now: float) -> tuple[Batch, list[Cancel]] | None:
        """Take the next batch; None while there are too few complete groups, or when all steps are done.

        Also None while the batch is held for the share of a slow task (see `shares`). Of each task the groups
        that started at the oldest version go first, then by group. Cutting moves the window on, so it also
        returns what to cancel: redundant groups that it has no room for (`surplus`, the least progressed
        first) and trajectories that no later batch may hold (`stale`).
        """
        if self.step >= self.rules.total_steps:
            return None
        groups = self._groups.values()
        ready = sorted(
            (start, group.id, group.task)
            for group in groups
            if group.complete and (start := group.start_version) is not None and start >= self._oldest()
        )
        chosen = self._shares.choose(
            now,
            # Under alpha 0 this is the last batch for all alike.
            [(task, group, 0 < self.rules.alpha == self.step - start) for start, group, task in ready],
            {group.task for group in groups if not (group.complete or group.troubled)},
            self._mix.awake(now),
        )
        if chosen is None:
            return None
        items = [item for group in chosen for item in self._consume(self._groups[group])]
        batch = Batch(self.step, self.step, tuple(items))
        self.step += 1
        cancels = self._trim()
        for group in list(self._groups.values()):
            cancels += self._purge(group)
        return batch, cancels

    def _consume(self, group: Group) -> list[BatchItem]:
        items = []
        for member in group.in_state(State.FINISHED):
            assert member.start_version is not None
            items.append(
                BatchItem(
                    trajectory=member.trajectory,
                    group=group.id,
                    member=member.index,
                    task=group.task,
                    reward=member.reward,
                    start_version=member.start_version,
                    staleness=self.step - member.start_version,
                )
            )
            self._end(member.trajectory, "ok")
        self._close(group)
        return items

    def _trim(self) -> list[Cancel]:
        """Drop the groups the window has no room for. Without redundancy there are none."""
        excess = len(self._groups) - self._room()
        if excess <= 0:
            return []
        victims = sorted(self._groups.values(), key=lambda group: group.progress(self._oldest()))[:excess]
        return [cancel for group in victims for cancel in self._drop(group)]

    def _purge(self, group: Group) -> list[Cancel]:
        """Cancel the group's stale trajectories, and replace them or drop the group."""
        stale = group.too_old(self._oldest())
        keep = group.worth_keeping(self._oldest())
        cancels = [self._cancel(member, "stale") for member in stale]
        for member in stale:
            member.wait()
            if keep:
                self._waiting.add(Place(group.id, member.index, member.attempt))
        return cancels if keep else cancels + self._drop(group)

    # --- ends ----------------------------------------------------------------------------------

    def shutdown(self) -> list[Cancel]:
        """End the run early: everything open is surplus, and nothing is admitted any more."""
        self._closed = True
        return [cancel for group in list(self._groups.values()) for cancel in self._drop(group)]

    def _drop(self, group: Group) -> list[Cancel]:
        self._close(group)
        return [self._cancel(member, "surplus") for member in group.members if member.held]

    def _close(self, group: Group) -> None:
        del self._groups[group.id]
        self._mix.close(group.task)

    def _cancel(self, member: Member, status: Dropped) -> Cancel:
        self._end(member.trajectory, status)
        return Cancel(member.trajectory, status)

    def _end(self, trajectory: int, status: Status) -> None:
        group, _ = self._held.pop(trajectory)
        self._counts[group.task][status] += 1

    # --- from one attempt of the run to the next -----------------------------------------------

    def state(self) -> LedgerState:
        """What a later attempt needs to go on from here; to be taken right after a batch was cut."""
        flying = Counter(group.task for group, _ in self._held.values())
        return LedgerState(
            step=self.step,
            next_group=self._next_group,
            groups=tuple(group.state() for group in self._groups.values()),
            credits=self._mix.credits,
            drops=self._mix.drops,
            owed=self._shares.owed,
            counts=tuple(
                dict(counts - Counter(started=flying[task])) for task, counts in enumerate(self._counts)
            ),
        )

    def _restore(self, state: LedgerState) -> None:
        state.check(self.tasks, self._members)
        self.step = self.version = state.step
        self._next_group = state.next_group
        self._counts = [Counter(counts) for counts in state.counts]
        self._mix.restore(state.credits, state.drops, [group.task for group in state.groups])
        self._shares.restore(state.owed)
        for saved in state.groups:
            group = Group(saved.id, saved.task, self.rules.group_size, saved.env_seed)
            self._fill(group, group.restored(saved, self.rules.retry_attempts))

    # --- views ---------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every batch of the run has been cut."""
        return self.step >= self.rules.total_steps

    @property
    def dispatched(self) -> int:
        """Trajectories dispatched by this ledger itself, since `first_trajectory`."""
        return self._next_trajectory - self._first_trajectory

    def counts(self, task: int | None = None) -> dict[str, int]:
        """Trajectories so far dispatched (`started`) and ended in each status, of one task or of all."""
        total: Counter[str] = sum(self._counts if task is None else [self._counts[task]], Counter())
        return {name: total[name] for name in ("started", *STATUSES)}

    def snapshot(self) -> Snapshot:
        """What is open, for a display."""
        views = tuple(group.view() for group in self._groups.values())
        return Snapshot(self.step, self.version, self._room(), sum(view.running for view in views), views)

    def waiting_for(self, now: float) -> str:
        """What the next batch still lacks, for the error of a deadline."""
        if self.done:
            return f"nothing: all {self.rules.total_steps} batches have been cut"
        groups = list(self._groups.values())
        complete = sum(group.complete for group in groups)
        parts = [
            f"batch {self.step} needs {self.rules.groups_per_batch} complete groups and has {complete} "
            f"({len(groups)} open of {self._room()} admissible; lowest installed version {self.version})"
        ]
        for group in [group for group in groups if not group.complete][:8]:
            parts.append(
                f"group {group.id} of task {self.tasks[group.task].name!r}: "
                f"{group.finished} of {group.size} finished, {group.lacks(now)}"
            )
        return "; ".join(parts + self._shares.describe(now) + self._mix.describe(now))
