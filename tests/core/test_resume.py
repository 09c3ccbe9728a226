"""A ledger that goes on in a later attempt: same groups, same seeds, nothing twice, every invariant."""

from dataclasses import replace
from random import Random

import pytest

from hpc_rollart.core.ledger import Ledger
from hpc_rollart.core.state import LedgerState
from hpc_rollart.core.types import Rules, Task
from tests.core.driver import Behaviour, World, simulate, simulate_killed
from tests.core.small import PLENTY, cut, finish, make_ledger, make_rules, of_group
from tests.core.test_schedules import random_rules, random_world


@pytest.mark.parametrize("block", range(8))
def test_every_invariant_holds_over_attempts_that_are_killed_anywhere(block: int) -> None:
    for seed in range(block * 50, (block + 1) * 50):
        random = Random(seed)
        rules = random_rules(random)
        tasks = [Task(name, random.choice((0.5, 1.0, 3.0))) for name in "abc"[: random.randint(1, 3)]]
        behaviours = [
            Behaviour(
                episode_s=random.choice((0.2, 1.0, 5.0)),
                env_fails=random.choice((0.0, 0.3)),
                hangs=random.choice((0.0, 0.1)),
            )
            for _ in tasks
        ]
        kills = [random.randint(1, 300) for _ in range(random.randint(1, 4))]
        attempts = simulate_killed(
            rules, tasks, behaviours, random_world(random), seed, kills, every=random.randint(1, 3)
        )
        last = attempts[-1]
        assert [batch.step for batch in last.batches] == list(range(rules.total_steps))
        consumed = [item for batch in last.batches for item in batch.items]
        assert len({item.trajectory for item in consumed}) == len(consumed)
        groups = [item.group for item in consumed]
        assert {groups.count(group) for group in groups} == {rules.group_size}
        for attempt in attempts:
            opened = sorted(group for group in attempt.group_of if group >= attempt.first_group)
            assert opened == list(range(attempt.first_group, attempt.first_group + len(opened)))


def test_under_alpha_0_a_resumed_ledger_opens_the_same_groups_with_the_same_seeds() -> None:
    for seed in range(60):
        random = Random(seed)
        rules = random_rules(
            random, mode="sync", alpha=0, total_steps=6, redundant_groups=0, redundant_members=0
        )
        tasks = [Task("a"), Task("b", 2.0), Task("c", 0.5)]
        world = random_world(random)
        whole = simulate(rules, tasks, world=world, seed=seed).ledger
        # A task that rests would give its groups to others, by the clock: nothing fails here.
        killed = simulate_killed(rules, tasks, [Behaviour()] * 3, world, seed, [40, 40, 60], every=1)

        def made(batches: list) -> list:
            return [sorted({(i.group, i.task) for i in batch.items}) for batch in batches]

        assert made(killed[-1].batches) == made(whole.batches)
        for attempt in killed:
            for group, made_of in attempt.group_of.items():
                assert made_of == whole.group_of[group]
            assert attempt.sample_seeds <= whole.sample_seeds


def test_open_groups_come_back_with_everything_in_flight_waiting() -> None:
    ledger = make_ledger(alpha=1, redundant_members=1, retry_attempts=2)
    first = ledger.admit(0.0, PLENTY)
    finish(ledger, of_group(first, 0, 1))
    failing = of_group(first, 2)[0]
    ledger.failed(failing.trajectory, "env_failed", "boom", 0.0)
    groups, _ = cut(ledger)
    assert groups == [0, 1]
    state = ledger.state()
    later = Ledger(ledger.rules, ledger.tasks, state=state, first_trajectory=1 << 40)
    again = later.admit(0.0, PLENTY)
    assert [(a.group, a.member, a.attempt) for a in again[:6]] == [
        (2, 0, 1), (2, 1, 0), (2, 2, 0), (3, 0, 0), (3, 1, 0), (3, 2, 0)
    ]  # fmt: skip
    assert [a.trajectory for a in again] == list(range(1 << 40, (1 << 40) + len(again)))
    before = {(a.group, a.member): (a.env_seed, a.sample_seed) for a in first}
    assert all(before[a.group, a.member] == (a.env_seed, a.sample_seed) for a in again[1:6])
    assert {a.group for a in again[6:]} == {4, 5}
    assert later.counts()["started"] == 4 + 1 + 2 + len(again)  # ok, failed, surplus, and these
    with pytest.raises(ValueError, match="never admitted"):
        later.started(0, 1)


def test_a_member_that_was_given_up_stays_so_and_one_not_needed_is_wanted_again() -> None:
    ledger = make_ledger(alpha=2, redundant_members=1, retry_attempts=1, groups_per_batch=1)
    first = ledger.admit(0.0, PLENTY)
    ledger.failed(of_group(first, 2)[0].trajectory, "env_failed", "boom", 0.0)
    finish(ledger, of_group(first, 1)[:2])
    finish(ledger, of_group(first, 0)[:2])
    assert cut(ledger)[0] == [0]
    later = Ledger(ledger.rules, ledger.tasks, state=ledger.state())
    places = [(a.group, a.member) for a in later.admit(0.0, 5)]
    assert places == [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_state_of_another_run_is_refused() -> None:
    state = make_ledger(Task("a"), Task("b")).state()
    with pytest.raises(ValueError, match="2 tasks"):
        Ledger(make_rules(), [Task("a")], state=state)
    ledger = make_ledger()
    ledger.admit(0.0, PLENTY)
    with pytest.raises(ValueError, match="members"):
        Ledger(replace(ledger.rules, redundant_members=1), ledger.tasks, state=ledger.state())
    for damage in ({}, {"step": None}, {"groups": [{}]}, {"counts": 3}):
        plain = ledger.state().plain() | damage if damage else {}
        with pytest.raises(ValueError, match="no state of a ledger"):
            LedgerState.from_plain(plain)


def test_what_a_task_is_owed_is_carried_over() -> None:
    rules = Rules(group_size=1, groups_per_batch=1, total_steps=40)
    tasks = [Task("often", 3.0), Task("rarely")]
    attempts = simulate_killed(rules, tasks, [Behaviour()] * 2, World(slots=4), 0, [150] * 8, every=1)
    taken = [item.task for batch in attempts[-1].batches for item in batch.items]
    assert 7 <= sum(taken) <= 13
