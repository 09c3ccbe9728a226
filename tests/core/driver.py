"""A whole run on a simulated clock: env ranks, generators and a trainer around the ledger and the router.

Everything random comes from one seed. Messages take time, so they cross: a cancel may meet a finish, a
start may be reported after the end, and generators install new weights at different times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random

from hpc_rollart.core.router import Router
from hpc_rollart.core.types import Admission, Cancel, Failure, Rules, Task
from tests.core.audit import AuditedLedger

NEVER = float("inf")


@dataclass(frozen=True)
class Behaviour:
    """How the episodes of one task go: mean seconds of each part, and how often they go wrong."""

    reset_s: float = 0.3
    episode_s: float = 1.0
    env_fails: float = 0.0
    reward_fails: float = 0.0
    hangs: float = 0.0
    timeout_s: float = 10.0  # after which a hung episode is reported as failed; NEVER: only a cancel ends it


@dataclass(frozen=True)
class World:
    """What the run runs on."""

    slots: int = 16
    generators: int = 2
    message_s: float = 0.02
    train_s: float = 1.0
    install_s: float = 0.3


@dataclass
class Run:
    """What came of a simulated run."""

    ledger: AuditedLedger
    router: Router
    seconds: float
    events: int
    ended: dict[int, float] = field(default_factory=dict)  # trajectory -> when its slot was free again


class Simulation:
    """Drives one run to its end; see `simulate`."""

    def __init__(
        self,
        rules: Rules,
        tasks: Sequence[Task],
        behaviours: Sequence[Behaviour],
        world: World,
        seed: int,
        ledger: AuditedLedger | None = None,
    ) -> None:
        self.random = Random(seed)
        self.rules, self.tasks, self.behaviours, self.world = rules, tasks, behaviours, world
        self.ledger = ledger or AuditedLedger(rules, tasks)
        step = self.ledger.ledger.step
        self.router = Router(["even", "odd"], {rank: rank % 2 for rank in range(world.generators)})
        self.now = 0.0
        self.events = 0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.free_slots = world.slots
        self.running: dict[int, Admission] = {}  # what occupies a slot, in truth
        self.ended: dict[int, float] = {}
        self.serving = [step] * world.generators  # versions, in truth
        self.reported = [step] * world.generators  # versions, as the coordinator knows them
        self.published = self.granted = step
        self.trainer_waits = True
        self.wakeup = NEVER

    def run_until_killed(self, events: int) -> int:
        """Run for so many events at most, then drop everything; returns the steps that were trained."""
        self.pump()
        while self.agenda and self.events < events:
            self.now, _, action = heappop(self.agenda)
            action()
            self.events += 1
        return self.published

    def run(self, max_events: int) -> Run:
        """Run until nothing is left to happen.

        Raises
        ------
        AssertionError
            If an invariant is broken, or the run comes to rest or turns in circles before its last batch.
        """
        self.pump()
        while self.agenda:
            self.now, _, action = heappop(self.agenda)
            action()
            self.events += 1
            if self.events > max_events:
                raise AssertionError(f"livelock: {self.ledger.ledger.waiting_for(self.now)}")
        if not self.ledger.ledger.done:
            raise AssertionError(f"deadlock: {self.ledger.ledger.waiting_for(self.now)}")
        assert not self.ledger.live and not self.running, "something outlived the run"
        assert all(load == 0 for load in self.router.load().values())
        assert self.ended.keys() == self.ledger.books.keys()
        return Run(self.ledger, self.router, self.now, self.events, self.ended)

    def after(self, mean: float, action: Callable[[], None]) -> None:
        delay = self.random.expovariate(1.0 / mean) if mean > 0 else 0.0
        self.at(self.now + delay, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        heappush(self.agenda, (time, self.random.getrandbits(62), action))

    def message(self, action: Callable[[], None]) -> None:
        """Deliver to the coordinator after a while, and let it decide."""

        def deliver() -> None:
            action()
            self.pump()

        self.after(self.world.message_s, deliver)

    # --- coordinator ---------------------------------------------------------------------------

    def pump(self) -> None:
        """Everything the coordinator does after an event."""
        if self.trainer_waits and (cut := self.ledger.cut_batch(self.now)) is not None:
            batch, cancels = cut
            self.trainer_waits = False
            for item in batch.items:
                self.router.release(item.trajectory)
            self.cancel(cancels)
            self.after(self.world.train_s, partial(self.trained, batch.version + 1))
        admissions = self.ledger.admit(self.now, self.free_slots)
        self.free_slots -= len(admissions)
        for admission in admissions:
            self.router.route(admission.trajectory, self.tasks[admission.task].affinity)
            self.running[admission.trajectory] = admission
            self.after(self.world.message_s, partial(self.reset, admission))
        while self.granted < self.published and self.ledger.may_install(self.granted + 1):
            self.granted += 1
            for generator in range(self.world.generators):
                self.after(self.world.install_s, partial(self.install, generator, self.granted))
        wakeup = self.ledger.ledger.next_wakeup(self.now)
        if wakeup is not None and not self.now < self.wakeup <= wakeup:
            self.wakeup = wakeup
            self.at(wakeup, self.pump)

    def cancel(self, cancels: list[Cancel]) -> None:
        for cancel in cancels:
            self.router.release(cancel.trajectory)
            self.after(self.world.message_s, partial(self.end, cancel.trajectory))

    def on_started(self, trajectory: int, version: int) -> None:
        self.cancel(self.ledger.started(trajectory, version))

    def on_finished(self, trajectory: int, reward: float, version: int) -> None:
        self.router.release(trajectory)
        self.cancel(self.ledger.finished(trajectory, reward, version))

    def on_failed(self, trajectory: int, status: Failure, reason: str) -> None:
        self.router.release(trajectory)
        self.cancel(self.ledger.failed(trajectory, status, reason, self.now))

    def on_free(self) -> None:
        self.free_slots += 1

    def on_installed(self, generator: int, version: int) -> None:
        self.reported[generator] = max(self.reported[generator], version)
        self.ledger.installed(min(self.reported))

    def on_next_batch(self) -> None:
        self.trainer_waits = True

    # --- trainer and generators ----------------------------------------------------------------

    def trained(self, version: int) -> None:
        self.published = version
        self.message(self.on_next_batch)

    def install(self, generator: int, version: int) -> None:
        if self.rules.mode == "one_off":
            mine = [t for t in self.ledger.live if self.ledger.books[t].reward is None and t in self.running]
            begun = [t for t in mine if self.ledger.books[t].sampled not in (None, *range(version, 10**6))]
            assert not begun, f"one_off: {begun} would be sampled by two versions"
        self.serving[generator] = max(self.serving[generator], version)
        self.message(partial(self.on_installed, generator, version))

    # --- env ranks -----------------------------------------------------------------------------

    def reset(self, admission: Admission) -> None:
        if admission.trajectory in self.running:
            behaviour = self.behaviours[admission.task]
            self.after(behaviour.reset_s, partial(self.first_token, admission))

    def first_token(self, admission: Admission) -> None:
        trajectory = admission.trajectory
        if trajectory not in self.running:
            return
        behaviour = self.behaviours[admission.task]
        draw = self.random.random()
        # Half of the failures come before the first token, and so have no start version.
        early = self.random.random() < 0.5
        hang = draw < behaviour.hangs
        env_fails = not hang and draw < behaviour.hangs + behaviour.env_fails
        version = self.ledger.ledger.version
        if not (early and (hang or env_fails)):
            route = self.router.assignment(trajectory)
            # A cancel that is on its way has released the route; the episode does not know yet.
            version = self.serving[route.replica if route else 0]
            self.ledger.sampled(trajectory, version)
            self.message(partial(self.on_started, trajectory, version))
        if hang:
            if behaviour.timeout_s < NEVER:
                fail = partial(self.fail, trajectory, "env_failed", "time-out")
                self.at(self.now + behaviour.timeout_s, fail)
        elif env_fails:
            self.after(behaviour.episode_s, partial(self.fail, trajectory, "env_failed", "step raised"))
        elif self.random.random() < behaviour.reward_fails:
            self.after(behaviour.episode_s, partial(self.fail, trajectory, "reward_failed", "no score"))
        else:
            self.after(behaviour.episode_s, partial(self.finish, trajectory, version))

    def finish(self, trajectory: int, version: int) -> None:
        if trajectory in self.running:
            reward = self.random.random()
            self.message(partial(self.on_finished, trajectory, reward, version))
            self.end(trajectory)

    def fail(self, trajectory: int, status: Failure, reason: str) -> None:
        if trajectory in self.running:
            self.message(partial(self.on_failed, trajectory, status, reason))
            self.end(trajectory)

    def end(self, trajectory: int) -> None:
        """The episode is over and its slot is free; a cancel of one that ended finds nothing to do."""
        if self.running.pop(trajectory, None) is not None:
            self.ended[trajectory] = self.now
            self.message(self.on_free)


def simulate(
    rules: Rules,
    tasks: Sequence[Task] = (Task("task"),),
    behaviours: Sequence[Behaviour] | None = None,
    world: World | None = None,
    seed: int = 0,
    max_events: int = 50_000,
) -> Run:
    """Run `rules` to the last batch under seeded random times and faults, checking every decision.

    Parameters
    ----------
    behaviours
        One for each task; well-behaved by default.
    max_events
        More than any run that makes progress needs.
    """
    behaviours = behaviours or [Behaviour()] * len(tasks)
    return Simulation(rules, tasks, behaviours, world or World(), seed).run(max_events)


def simulate_killed(
    rules: Rules,
    tasks: Sequence[Task],
    behaviours: Sequence[Behaviour],
    world: World,
    seed: int,
    kills: Sequence[int],
    every: int,
) -> list[AuditedLedger]:
    """As `simulate`, but kill everything after each number of events in `kills`; the ledgers of all attempts.

    An attempt begins at the last step divisible by `every` that the one before trained.
    """
    attempts = [AuditedLedger(rules, tasks)]
    start = 0
    for attempt, events in enumerate(kills, 1):
        simulation = Simulation(rules, tasks, behaviours, world, seed + attempt, attempts[-1])
        trained = simulation.run_until_killed(events)
        start = max(start, trained // every * every)
        first = attempt << 40
        if start:
            attempts.append(attempts[-1].resumed(start, first))
        else:
            attempts.append(AuditedLedger(rules, tasks, first))
    Simulation(rules, tasks, behaviours, world, seed, attempts[-1]).run(50_000)
    return attempts
