"""How batches are shared among tasks, and for whom they wait, by a small example that names each rule."""

from collections import Counter

import pytest

from hpc_rollart.core.ledger import Ledger
from hpc_rollart.core.types import Admission, Batch, Cancel, Task
from tests.core.small import PLENTY, fail_group, finish, make_ledger


def two_tasks(**given: object) -> tuple[Ledger, list[Admission], list[Admission]]:
    """A ledger asked for a batch of two at 0.0, and the trajectories of its quick and its slow task."""
    ledger = make_ledger(Task("quick"), Task("slow"), group_size=1, **given)
    admissions = ledger.admit(0.0, PLENTY)
    assert ledger.cut_batch(0.0) is None
    return ledger, [a for a in admissions if a.task == 0], [a for a in admissions if a.task == 1]


def tasks_of(result: tuple[Batch, list[Cancel]] | None) -> list[int]:
    assert result is not None
    return [item.task for item in result[0].items]


def test_a_batch_waits_for_the_share_of_a_slow_task() -> None:
    ledger, quick, slow = two_tasks()
    finish(ledger, quick)
    assert ledger.cut_batch(10.0) is None
    assert "held for the share of 'slow', for 4.0 s more at most" in ledger.waiting_for(16.0)
    finish(ledger, slow[:1])
    assert tasks_of(ledger.cut_batch(16.0)) == [0, 1]


@pytest.mark.parametrize(("patience", "until"), [(0.0, 10.0), (1.0, 20.0), (2.0, 30.0)])
def test_a_batch_is_held_in_proportion_to_the_time_it_has_taken(patience: float, until: float) -> None:
    ledger, quick, _ = two_tasks(share_patience=patience)
    finish(ledger, quick)
    if patience:
        assert ledger.cut_batch(10.0) is None and ledger.cut_batch(until - 0.1) is None
        assert ledger.next_wakeup(until - 0.1) == until
    assert tasks_of(ledger.cut_batch(until)) == [0, 0]


def holds(steps: int, slow_groups: int) -> tuple[list[int], float]:
    """The steps held in vain, of a second each, for a task that delivers `slow_groups` of the 2 it is due.

    From step 3 on, that is; until then nothing. The second figure is the time that the steps take in all.
    """
    ledger = make_ledger(
        Task("quick"), Task("slow"), group_size=1, groups_per_batch=4, total_steps=steps + 2, alpha=3
    )
    now, held, slow = 0.0, [], []
    ledger.cut_batch(now)
    for step in range(steps):
        ledger.installed(step)
        admissions = ledger.admit(now, PLENTY)
        slow += [a for a in admissions if a.task == 1]
        finish(ledger, [a for a in admissions if a.task == 0], step)
        if step >= 3:
            finish(ledger, slow[:slow_groups], step)
            del slow[:slow_groups]
        now += 1.0
        if ledger.cut_batch(now) is None:
            held.append(step)
            assert ledger.cut_batch(now + 0.9) is None
            now += 1.0
            assert ledger.cut_batch(now) is not None
    return held, now


def test_a_task_that_delivers_nothing_is_waited_for_once() -> None:
    assert holds(30, 0) == ([0], 31.0)


def test_a_task_is_waited_for_in_vain_for_a_twentieth_of_the_time_at_most() -> None:
    held, seconds = holds(100, 1)
    assert held[0] == 0
    assert 5 <= len(held) <= 0.05 * seconds + 1


def test_a_task_that_is_back_in_time_is_not_held_for() -> None:
    assert holds(30, 2)[0] == [0]


def test_a_batch_is_not_held_for_a_task_that_has_nothing_under_way_or_rests() -> None:
    ledger, quick, slow = two_tasks(alpha=0, retry_attempts=1, backoff_s=60.0)
    finish(ledger, quick)
    assert ledger.cut_batch(10.0) is None
    fail_group(ledger, slow[0], 10.0)
    (another,) = ledger.admit(10.0, PLENTY)
    assert another.task == 0
    finish(ledger, [another])
    assert tasks_of(ledger.cut_batch(10.0)) == [0, 0]


def test_a_batch_is_not_held_for_a_retry() -> None:
    ledger, quick, slow = two_tasks(retry_attempts=2)
    finish(ledger, quick)
    assert ledger.cut_batch(10.0) is None
    for member in slow:
        ledger.failed(member.trajectory, "env_failed", "boom", 10.0)
    assert tasks_of(ledger.cut_batch(10.0)) == [0, 0]


def test_no_hold_is_longer_than_its_bound() -> None:
    ledger, quick, _ = two_tasks(share_hold_max_s=3.0)
    finish(ledger, quick)
    assert ledger.cut_batch(10.0) is None
    assert ledger.next_wakeup(10.0) == 13.0
    assert tasks_of(ledger.cut_batch(13.0)) == [0, 0]


def test_what_a_task_missed_it_gets_in_the_next_batch() -> None:
    ledger, quick, slow = two_tasks(groups_per_batch=4, alpha=2)
    finish(ledger, quick)
    finish(ledger, slow[:1])
    assert ledger.cut_batch(1.0) is None
    assert sorted(tasks_of(ledger.cut_batch(2.0))) == [0, 0, 0, 1]
    finish(ledger, slow)
    ledger.installed(1)
    finish(ledger, [a for a in ledger.admit(2.0, PLENTY) if a.task == 0], 1)
    assert sorted(tasks_of(ledger.cut_batch(2.0))) == [0, 1, 1, 1]


def test_a_complete_group_that_would_go_stale_comes_before_what_a_task_is_due() -> None:
    ledger = make_ledger(Task("a", 10.0), Task("b"), Task("c"), group_size=1)
    for step in range(8):
        finish(ledger, ledger.admit(float(step), PLENTY), step)
        result = ledger.cut_batch(float(step))
        assert result is not None and not result[1]
        ledger.installed(step + 1)
    assert ledger.counts()["stale"] == 0


def test_fractions_of_a_group_are_owed_to_later_batches() -> None:
    ledger = make_ledger(Task("a", 3.0), Task("b"), group_size=1, groups_per_batch=2, alpha=0)
    batches = []
    for step in range(4):
        finish(ledger, ledger.admit(0.0, PLENTY), step)
        batches.append(tasks_of(ledger.cut_batch(0.0)))
        ledger.installed(step + 1)
    assert Counter(task for batch in batches for task in batch) == {0: 6, 1: 2}
