"""The invariants hold on thousands of seeded random schedules of whole runs."""

from dataclasses import replace
from random import Random

import pytest

from hpc_rollart.core.types import Rules, Task
from tests.core.driver import NEVER, Behaviour, Run, World, simulate

BLOCKS = range(20)
PER_BLOCK = 100
AFFINITIES = (None, "even", "odd")


def random_rules(random: Random, **given: object) -> Rules:
    mode = random.choice(("async", "async", "one_off", "sync"))
    alpha = {"sync": 0, "one_off": 1}.get(mode, random.choice((0, 1, 1, 2, 3)))
    rules = Rules(
        group_size=random.randint(1, 3),
        groups_per_batch=random.randint(1, 3),
        total_steps=random.randint(1, 5),
        seed=random.getrandbits(32),
        alpha=alpha,
        mode=mode,
        redundant_groups=random.choice((0, 0, 1, 2)),
        redundant_members=random.choice((0, 0, 1, 2)),
        share_patience=random.choice((0.0, 0.5, 1.0, 1.0, 5.0)),
        share_hold_max_s=random.choice((0.5, NEVER)),
        retry_attempts=random.randint(1, 4),
        backoff_s=random.choice((0.01, 0.1, 1.0)),
        backoff_max_s=5.0,
    )
    return replace(rules, **given)  # type: ignore[arg-type]


def random_world(random: Random) -> World:
    return World(
        slots=random.choice((1, 2, 5, 16, 64)),
        generators=random.randint(1, 4),
        message_s=random.choice((0.0, 0.02, 0.5)),
        train_s=random.choice((0.0, 0.5, 3.0)),
        install_s=random.choice((0.0, 0.3, 4.0)),
    )


def random_run(seed: int) -> Run:
    """Any mode, mix of tasks, world and faults; every task works often enough to get on."""
    random = Random(seed)
    names = "abc"[: random.randint(1, 3)]
    tasks = [Task(name, random.choice((0.5, 1.0, 3.0)), random.choice(AFFINITIES)) for name in names]
    behaviours = [
        Behaviour(
            reset_s=random.choice((0.0, 0.3, 3.0)),
            episode_s=random.choice((0.2, 1.0, 5.0)),
            env_fails=random.choice((0.0, 0.1, 0.4)),
            reward_fails=random.choice((0.0, 0.1, 0.3)),
            hangs=random.choice((0.0, 0.1)),
            timeout_s=random.choice((2.0, 20.0)),
        )
        for _ in tasks
    ]
    return simulate(random_rules(random), tasks, behaviours, random_world(random), seed)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_invariant_holds_on_random_schedules(block: int) -> None:
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        run = random_run(seed)
        assert len(run.ledger.batches) == run.ledger.rules.total_steps


def test_the_schedules_reach_every_status_and_every_kind_of_crossing() -> None:
    total = {"ok": 0, "stale": 0, "surplus": 0, "env_failed": 0, "reward_failed": 0}
    dropped_after_finish = fallbacks = 0
    for seed in range(150):
        run = random_run(seed)
        for name in total:
            total[name] += run.ledger.ledger.counts()[name]
        books = run.ledger.books.values()
        dropped_after_finish += sum(b.reward is not None and b.status != "ok" for b in books)
        fallbacks += run.router.fallbacks.total()
    assert all(total.values()) and dropped_after_finish and fallbacks


def test_the_same_seed_and_the_same_events_give_the_same_decisions() -> None:
    for seed in range(50):
        assert random_run(seed).ledger.log == random_run(seed).ledger.log


def test_alpha_0_is_sync_decision_for_decision() -> None:
    for seed in range(100):
        random = Random(seed)
        rules = random_rules(random, mode="sync", alpha=0)
        tasks = [Task("a"), Task("b", 2.0)]
        behaviours = [Behaviour(env_fails=0.1), Behaviour(episode_s=3.0, reward_fails=0.1)]
        world = random_world(random)
        synchronous = simulate(rules, tasks, behaviours, world, seed)
        alpha_0 = simulate(replace(rules, mode="async"), tasks, behaviours, world, seed)
        assert synchronous.ledger.log == alpha_0.ledger.log
        assert all(item.staleness == 0 for batch in alpha_0.ledger.batches for item in batch.items)


def test_one_off_trains_each_batch_on_the_version_before_its_own() -> None:
    for seed in range(100):
        random = Random(seed)
        rules = random_rules(random, mode="one_off", alpha=1)
        run = simulate(rules, world=random_world(random), seed=seed)
        admitted = list(run.ledger.group_version.values())
        per_version = rules.groups_per_batch + rules.redundant_groups
        # The first version makes two batches: that of step 0 and that which is trained on meanwhile.
        quota = [per_version * min(2, rules.total_steps)] + [per_version] * max(0, rules.total_steps - 2)
        made = [admitted.count(version) for version in range(len(quota))]
        assert all(count <= bound for count, bound in zip(made, quota, strict=True))
        if rules.redundant_groups == 0:
            assert made == quota
            for batch in run.ledger.batches:
                assert {item.staleness for item in batch.items} == {min(1, batch.step)}


def test_without_redundancy_and_faults_nothing_dispatched_is_wasted_by_the_window_alone() -> None:
    for seed in range(100):
        rules = random_rules(Random(seed), mode="sync", alpha=0, redundant_groups=0, redundant_members=0)
        run = simulate(rules, seed=seed)
        counts = run.ledger.ledger.counts()
        assert (
            counts["started"]
            == counts["ok"]
            == (rules.group_size * rules.groups_per_batch * rules.total_steps)
        )


@pytest.mark.parametrize("mode", ["async", "one_off", "sync"])
def test_a_task_that_always_fails_stops_no_other(mode: str) -> None:
    for seed in range(25):
        rules = random_rules(Random(seed), mode=mode, alpha={"async": 2, "one_off": 1, "sync": 0}[mode])
        tasks = [Task("broken", weight=5.0), Task("sound")]
        run = simulate(rules, tasks, [Behaviour(env_fails=1.0), Behaviour()], seed=seed)
        assert {item.task for batch in run.ledger.batches for item in batch.items} == {1}


@pytest.mark.parametrize("mode", ["async", "one_off", "sync"])
def test_a_task_that_always_times_out_stops_no_other(mode: str) -> None:
    for seed in range(25):
        rules = random_rules(Random(seed), mode=mode, alpha={"async": 2, "one_off": 1, "sync": 0}[mode])
        tasks = [Task("hangs", weight=5.0), Task("sound")]
        run = simulate(rules, tasks, [Behaviour(hangs=1.0), Behaviour()], World(slots=64), seed=seed)
        assert {item.task for batch in run.ledger.batches for item in batch.items} == {1}


def mixed(patience: float, slow_s: float) -> tuple[float, float, float]:
    """A quick task of weight 3 beside a slow one of weight 1; the trainer takes a second a batch.

    Returns the slow task's share of what was consumed, stale trajectories and seconds; means of 20 runs.
    """
    rules = Rules(group_size=2, groups_per_batch=8, total_steps=30, alpha=1, share_patience=patience)
    behaviours = [Behaviour(reset_s=0.0, episode_s=0.05), Behaviour(reset_s=0.0, episode_s=slow_s)]
    tasks = [Task("quick", 3.0), Task("slow")]
    runs = [simulate(rules, tasks, behaviours, World(slots=64), seed) for seed in range(20)]
    consumed = [item.task for run in runs for batch in run.ledger.batches for item in batch.items]
    stale = sum(run.ledger.statuses["stale"] for run in runs) / len(runs)
    return sum(consumed) / len(consumed), stale, sum(run.seconds for run in runs) / len(runs)


def test_batches_keep_the_shares_of_tasks_though_one_is_slower_than_the_trainer() -> None:
    (patient, patient_stale, _), (impatient, impatient_stale, _) = mixed(1.0, 0.5), mixed(0.0, 0.5)
    assert patient > 0.23 and patient > impatient + 0.03
    assert patient_stale < 0.7 * impatient_stale


@pytest.mark.parametrize("slow_s", [2.0, 20.0])
def test_a_task_that_cannot_keep_its_share_holds_the_others_up_but_a_little(slow_s: float) -> None:
    (_, _, patient_s), (_, _, impatient_s) = mixed(1.0, slow_s), mixed(0.0, slow_s)
    assert patient_s < 1.25 * impatient_s


def test_more_equal_tasks_than_a_batch_has_groups_cost_little_time_and_work() -> None:
    def run(patience: float) -> tuple[float, int]:
        rules = Rules(group_size=1, groups_per_batch=4, total_steps=40, alpha=1, share_patience=patience)
        tasks = [Task(f"task {i}") for i in range(20)]
        runs = [simulate(rules, tasks, world=World(train_s=0.3), seed=seed) for seed in range(10)]
        return sum(run.seconds for run in runs), sum(run.ledger.statuses["stale"] for run in runs)

    (patient_s, patient_stale), (impatient_s, impatient_stale) = run(1.0), run(0.0)
    assert patient_s < 1.2 * impatient_s
    assert patient_stale <= 1.5 * impatient_stale + 10


def test_a_task_that_hangs_for_ever_without_time_out_leaves_the_others_their_share_of_the_window() -> None:
    for seed in range(50):
        rules = Rules(group_size=2, groups_per_batch=4, total_steps=10, alpha=1)
        tasks = [Task("hangs"), Task("sound")]
        behaviours = [Behaviour(hangs=1.0, timeout_s=NEVER), Behaviour()]
        # The window of the last step is one batch wide, so the other half of it is not a batch.
        with pytest.raises(AssertionError, match="deadlock: batch 9 needs 4 complete groups"):
            simulate(rules, tasks, behaviours, World(slots=16), seed=seed)
