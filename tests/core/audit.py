"""A second opinion on the ledger: keeps its own books of every decision and asserts the invariants at each.

`AuditedLedger` has the methods of `Ledger` that change something. Whoever drives it may also tell it the
truth about start versions (`sampled`) ahead of the report that reaches the ledger.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_rollart.core.ledger import Ledger
from hpc_rollart.core.state import LedgerState
from hpc_rollart.core.types import STATUSES, Admission, Batch, Cancel, Failure, Rules, Task


@dataclass
class Book:
    """What is known of one dispatched trajectory."""

    admission: Admission
    sampled: int | None = None  # the version of its first token, in truth
    reported: int | None = None  # the same, once the ledger was told
    reward: float | None = None
    status: str | None = None


class AuditedLedger:
    """A ledger whose every decision is checked and logged in `log`."""

    def __init__(self, rules: Rules, tasks: Sequence[Task], first: int = 0) -> None:
        self.rules = rules
        self.tasks = tasks
        self.ledger = Ledger(rules, tasks, first_trajectory=first)
        self.books: dict[int, Book] = {}
        self.live: set[int] = set()
        self.seen: dict[tuple[int, int], int] = {}  # (group, member) -> attempts so far
        self.group_of: dict[int, tuple[int, int]] = {}  # group -> (env_seed, task)
        self.group_version: dict[int, int] = {}  # group -> lowest installed version when it was admitted
        self.sample_seeds: set[int] = set()
        self.consumed_groups: set[int] = set()
        self.batches: list[Batch] = []
        self.statuses: Counter[str] = Counter()
        self.log: list[object] = []
        self.cut_at: float | None = None  # when the last batch was cut, or the first one asked for
        self.full_at: float | None = None  # when the next one could first have been
        self.first = first  # id of the first trajectory
        self.first_group = 0  # id of the first group that it opens
        self.started_before = 0  # trajectories of earlier attempts that ended
        self.states: dict[int, LedgerState] = {}  # by step, right after the batch before it was cut

    def resumed(self, step: int, first: int) -> "AuditedLedger":
        """A later attempt that goes on from `step`, with books of its own; this one is dead."""
        state = LedgerState.from_plain(json.loads(json.dumps(self.states[step].plain())))
        assert state == self.states[step]
        later = AuditedLedger(self.rules, self.tasks, first)
        later.ledger = Ledger(self.rules, self.tasks, state=state, first_trajectory=first)
        later.states = {step: state}
        later.first_group = state.next_group
        later.batches = self.batches[:step]
        later.consumed_groups = {item.group for batch in later.batches for item in batch.items}
        for group in state.groups:
            later.group_of[group.id] = (group.env_seed, group.task)
            assert later.group_of[group.id] == self.group_of.get(group.id, later.group_of[group.id])
            for member, (attempt, _) in enumerate(group.members):
                later.seen[group.id, member] = attempt
        for counts in state.counts:
            later.statuses.update({name: n for name, n in counts.items() if name != "started"})
            later.started_before += counts.get("started", 0)
        assert later.ledger.step == later.ledger.version == step
        assert later.ledger.snapshot().in_flight == later.ledger.snapshot().complete == 0
        return later

    # --- the methods of Ledger -----------------------------------------------------------------

    def admit(self, now: float, free_slots: int) -> list[Admission]:
        admissions = self.ledger.admit(now, free_slots)
        assert len(admissions) <= max(0, free_slots)
        for admission in admissions:
            self._check_admission(admission)
        if admissions:
            self._check_state(now)
            self.log.append(("admit", tuple(admissions)))
        return admissions

    def sampled(self, trajectory: int, version: int) -> None:
        self.books[trajectory].sampled = version

    def started(self, trajectory: int, version: int) -> list[Cancel]:
        if trajectory in self.live:
            self.books[trajectory].sampled = self.books[trajectory].reported = version
        return self._cancels(self.ledger.started(trajectory, version))

    def finished(self, trajectory: int, reward: float, start_version: int) -> list[Cancel]:
        if trajectory in self.live:
            book = self.books[trajectory]
            book.reward, book.sampled, book.reported = reward, start_version, start_version
        return self._cancels(self.ledger.finished(trajectory, reward, start_version))

    def failed(self, trajectory: int, status: Failure, reason: str, now: float) -> list[Cancel]:
        if trajectory in self.live:
            self._end(trajectory, status)
        return self._cancels(self.ledger.failed(trajectory, status, reason, now))

    def installed(self, version: int) -> None:
        self.ledger.installed(version)

    def may_install(self, version: int) -> bool:
        allowed = self.ledger.may_install(version)
        if self.rules.mode != "one_off":
            assert allowed
        elif allowed and version > self.ledger.version:
            unfinished = [t for t in self.live if self.books[t].reward is None]
            assert not unfinished, f"one_off installs {version} though {unfinished} are unfinished"
        return allowed

    def cut_batch(self, now: float) -> tuple[Batch, list[Cancel]] | None:
        trained_from = self.ledger.step
        if self.cut_at is None:
            self.cut_at = now
        if self.ledger.snapshot().complete < self.rules.groups_per_batch:
            self.full_at = None
        elif self.full_at is None:
            self.full_at = now
        complete = {view.group: view.start_version for view in self.ledger.snapshot().groups if view.complete}
        cut = self.ledger.cut_batch(now)
        if cut is None:
            finished = sum(self.books[trajectory].reward is not None for trajectory in self.live)
            if finished >= self.rules.group_size * self.rules.groups_per_batch and not self.ledger.done:
                held = self.ledger.snapshot().complete >= self.rules.groups_per_batch
                assert not held or self._may_be_held(now), "a batch is withheld"
            return None
        batch, cancels = cut
        self.cut_at, self.full_at = now, None
        self.states[self.ledger.step] = self.ledger.state()
        self._check_batch(batch, trained_from)
        self._cancels(cancels)
        self._check_no_waste(complete, {item.group for item in batch.items}, trained_from)
        for trajectory in self.live:
            start = self.books[trajectory].reported
            assert start is None or self.ledger.step - start <= self.rules.alpha, "stale work left in flight"
        self._check_state(now)
        return batch, cancels

    def shutdown(self) -> list[Cancel]:
        return self._cancels(self.ledger.shutdown())

    # --- the checks ----------------------------------------------------------------------------

    def _check_admission(self, admission: Admission) -> None:
        rules, ledger = self.rules, self.ledger
        assert admission.trajectory == self.first + len(self.books)
        place = (admission.group, admission.member)
        assert 0 <= admission.member < rules.group_size + rules.redundant_members
        assert admission.attempt == self.seen.get(place, 0), "attempts count up by one"
        self.seen[place] = admission.attempt + 1
        made_of = (admission.env_seed, admission.task)
        assert self.group_of.setdefault(admission.group, made_of) == made_of, "a group shares its environment"
        assert admission.sample_seed not in self.sample_seeds
        self.sample_seeds.add(admission.sample_seed)
        assert ledger.step - ledger.version <= rules.alpha, "dispatched though it would start stale"
        self.group_version.setdefault(admission.group, ledger.version)
        self.books[admission.trajectory] = Book(admission)
        self.live.add(admission.trajectory)

    def _check_state(self, now: float) -> None:
        rules, ledger = self.rules, self.ledger
        snapshot = ledger.snapshot()
        batches = min(rules.alpha + ledger.version - ledger.step + 1, rules.total_steps - ledger.step)
        room = max(0, batches) * (rules.groups_per_batch + rules.redundant_groups)
        assert (
            len(snapshot.groups)
            <= room
            <= (rules.alpha + 1) * (rules.groups_per_batch + rules.redundant_groups)
        )
        assert len(self.live) <= room * (rules.group_size + rules.redundant_members)
        assert sum(view.finished + view.running for view in snapshot.groups) == len(self.live)
        counts = ledger.counts()
        assert {name: self.statuses[name] for name in STATUSES} == {name: counts[name] for name in STATUSES}
        started = self.started_before + len(self.books)
        assert counts["started"] == started == self.statuses.total() + len(self.live)
        wakeup = ledger.next_wakeup(now)
        assert wakeup is None or wakeup > now

    def _may_be_held(self, now: float) -> bool:
        """Whether the batch waits for a task that has work under way and lacks a group, and not too long."""
        rules = self.rules
        assert self.cut_at is not None and self.full_at is not None
        patience = min(rules.share_patience * (self.full_at - self.cut_at), rules.share_hold_max_s)
        groups = self.ledger.snapshot().groups
        complete = Counter(view.task for view in groups if view.complete)
        awake = set(self.ledger._mix.awake(now))
        total = sum(self.tasks[task].weight for task in awake | complete.keys())
        for task in awake & {view.task for view in groups if not view.complete}:
            share = rules.groups_per_batch * self.tasks[task].weight / total
            if complete[task] < max(1.0, share):
                return now < self.full_at + patience
        return False

    def _check_batch(self, batch: Batch, trained_from: int) -> None:
        rules = self.rules
        assert batch.step == batch.version == trained_from == len(self.batches) < rules.total_steps
        assert list(batch.items) == sorted(batch.items, key=lambda item: (item.group, item.member))
        sizes = Counter(item.group for item in batch.items)
        assert len(sizes) == rules.groups_per_batch
        assert set(sizes.values()) == {rules.group_size}, "only complete groups are consumed"
        assert not self.consumed_groups & sizes.keys(), "a group is consumed once"
        self.consumed_groups |= sizes.keys()
        assert len({(item.group, item.member) for item in batch.items}) == len(batch.items)
        for item in batch.items:
            book = self.books[item.trajectory]
            assert book.reward == item.reward, "only what finished is consumed, with the reward it got"
            assert (book.admission.group, book.admission.member) == (item.group, item.member)
            assert book.admission.task == item.task
            assert item.start_version == book.sampled
            assert 0 <= item.staleness == batch.version - item.start_version <= rules.alpha
            self._end(item.trajectory, "ok")
        self.batches.append(batch)
        self.log.append(batch)

    def _check_no_waste(self, complete: dict[int, int | None], taken: set[int], trained_from: int) -> None:
        """No complete group went stale in favour of one that could have waited."""
        last = {group for group, start in complete.items() if start == trained_from - self.rules.alpha}
        if self.rules.alpha and last - taken:
            assert taken <= last, "a complete group went stale and a newer one was taken"

    def _cancels(self, cancels: list[Cancel]) -> list[Cancel]:
        for cancel in cancels:
            start = self.books[cancel.trajectory].reported
            if cancel.status == "stale":
                assert start is not None and self.ledger.step - start > self.rules.alpha
                assert self.rules.alpha > 0, "what is left over under alpha 0 is surplus"
            self._end(cancel.trajectory, cancel.status)
        if cancels:
            self.log.append(("cancel", tuple(cancels)))
        return cancels

    def _end(self, trajectory: int, status: str) -> None:
        assert trajectory in self.live, f"trajectory {trajectory} ends twice: {status}"
        self.live.remove(trajectory)
        self.books[trajectory].status = status
        self.statuses[status] += 1
