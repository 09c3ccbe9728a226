"""The invariants hold whatever a driver does in whatever order, well-timed or not."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpc_rollart.core.types import FAILURES, Cancel, Failure, Rules, Task
from tests.core.audit import AuditedLedger

small = st.integers(1, 3)


class AnyOrder(RuleBasedStateMachine):
    """Every event at any moment; `AuditedLedger` asserts the invariants after each."""

    @initialize(
        size=small,
        groups=small,
        mode=st.sampled_from(["async", "one_off", "sync"]),
        alpha=st.integers(0, 3),
        redundancy=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        attempts=small,
        weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=3),
    )
    def begin(
        self,
        size: int,
        groups: int,
        mode: str,
        alpha: int,
        redundancy: tuple[int, int],
        attempts: int,
        weights: list[float],
    ) -> None:
        rules = Rules(
            group_size=size,
            groups_per_batch=groups,
            total_steps=4,
            alpha={"sync": 0, "one_off": 1}.get(mode, alpha),
            mode=mode,  # type: ignore[arg-type]
            redundant_groups=redundancy[0],
            redundant_members=redundancy[1],
            retry_attempts=attempts,
        )
        self.ledger = AuditedLedger(rules, [Task(f"task {i}", weight) for i, weight in enumerate(weights)])
        self.now = 0.0
        self.gone: list[int] = []

    def pick(self, data: st.DataObject, finished: bool) -> int | None:
        """A live trajectory that has or has not finished."""
        books = self.ledger.books
        candidates = sorted(t for t in self.ledger.live if (books[t].reward is not None) == finished)
        return data.draw(st.sampled_from(candidates)) if candidates else None

    def version(self, data: st.DataObject, trajectory: int) -> int:
        """Its start version, or any that some generator might serve."""
        known = self.ledger.books[trajectory].reported
        ledger = self.ledger.ledger
        return data.draw(st.integers(ledger.version, ledger.step)) if known is None else known

    def note(self, cancels: list[Cancel]) -> None:
        self.gone += [cancel.trajectory for cancel in cancels]

    @rule(slots=st.integers(0, 20))
    def admit(self, slots: int) -> None:
        self.ledger.admit(self.now, slots)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if (trajectory := self.pick(data, finished=False)) is not None:
            self.note(self.ledger.started(trajectory, self.version(data, trajectory)))

    @rule(data=st.data(), count=st.integers(1, 8))
    def finish(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if (trajectory := self.pick(data, finished=False)) is not None:
                self.note(self.ledger.finished(trajectory, 1.0, self.version(data, trajectory)))

    @rule(data=st.data(), status=st.sampled_from(FAILURES), finished=st.booleans())
    def fail(self, data: st.DataObject, status: Failure, finished: bool) -> None:
        # One that finished may still fail: its env rank could not store it.
        if (trajectory := self.pick(data, finished)) is not None:
            self.note(self.ledger.failed(trajectory, status, "reason", self.now))
            self.gone.append(trajectory)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def report_late(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(self.gone))
        assert self.ledger.started(trajectory, 0) == []
        assert self.ledger.finished(trajectory, 1.0, 0) == []
        assert self.ledger.failed(trajectory, "env_failed", "late", self.now) == []

    @rule()
    def cut(self) -> None:
        if (cut := self.ledger.cut_batch(self.now)) is not None:
            batch, cancels = cut
            self.gone += [item.trajectory for item in batch.items]
            self.note(cancels)

    @rule()
    def install(self) -> None:
        version = self.ledger.ledger.version + 1
        if version <= self.ledger.ledger.step and self.ledger.may_install(version):
            self.ledger.installed(version)

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def can_say_what_it_waits_for(self) -> None:
        assert self.ledger.ledger.waiting_for(self.now)

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        # From wherever it is, good behaviour brings the run to its end.
        for _ in range(10_000):
            if self.ledger.ledger.done:
                break
            self.now = self.ledger.ledger.next_wakeup(self.now) or self.now
            self.ledger.admit(self.now, 100)
            for trajectory in sorted(self.ledger.live):
                if trajectory in self.ledger.live and self.ledger.books[trajectory].reward is None:
                    known = self.ledger.books[trajectory].reported
                    version = self.ledger.ledger.version if known is None else known
                    self.ledger.finished(trajectory, 1.0, version)
            self.cut()
            self.install()
        assert self.ledger.ledger.done, self.ledger.ledger.waiting_for(self.now)
        self.ledger.shutdown()
        assert not self.ledger.live


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
