"""Each rule of the ledger, by a small example that names it."""

from collections import Counter

import pytest

from hpc_rollart.core.ledger import Ledger
from hpc_rollart.core.seeds import env_seed, sample_seed
from hpc_rollart.core.types import Admission, Cancel, Task
from tests.core.small import PLENTY, cut, fail_group, finish, groups_of, make_ledger, make_rules, of_group

# --- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 1, 2, 5])
def test_the_window_is_alpha_plus_one_batches_when_the_newest_weights_are_installed(alpha: int) -> None:
    ledger = make_ledger(alpha=alpha)
    assert len(groups_of(ledger.admit(0.0, PLENTY))) == 2 * (alpha + 1)
    assert ledger.admit(0.0, PLENTY) == []


def test_a_batch_cut_makes_no_room_until_its_weights_are_installed() -> None:
    ledger = make_ledger()
    finish(ledger, ledger.admit(0.0, PLENTY))
    cut(ledger)
    assert ledger.admit(0.0, PLENTY) == []
    ledger.installed(1)
    assert groups_of(ledger.admit(0.0, PLENTY)) == [4, 5]


def test_no_group_is_admitted_for_a_step_beyond_the_last() -> None:
    ledger = make_ledger(alpha=5, total_steps=2)
    admissions = ledger.admit(0.0, PLENTY)
    assert groups_of(admissions) == [0, 1, 2, 3]
    finish(ledger, admissions)
    cut(ledger)
    ledger.installed(1)
    assert ledger.admit(0.0, PLENTY) == []
    cut(ledger)
    assert ledger.done and ledger.cut_batch(0.0) is None and ledger.admit(0.0, PLENTY) == []


def test_no_more_is_dispatched_than_there_are_free_slots_and_started_groups_go_first() -> None:
    ledger = make_ledger(group_size=3)
    first, second = ledger.admit(0.0, 2), ledger.admit(0.0, 2)
    assert [(a.group, a.member) for a in first + second] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_groups_go_to_tasks_by_weight_in_a_smooth_order() -> None:
    ledger = make_ledger(Task("a", 3.0), Task("b", 1.0), group_size=1, groups_per_batch=8, alpha=0)
    assert [a.task for a in ledger.admit(0.0, PLENTY)] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_a_task_holds_no_more_open_groups_than_its_share_of_the_window() -> None:
    slow, quick = Task("slow"), Task("quick")
    ledger = make_ledger(slow, quick, group_size=1, groups_per_batch=4, alpha=1)
    admissions = ledger.admit(0.0, PLENTY)
    for version in range(1, 6):
        finish(ledger, [a for a in admissions if a.task == 1], version - 1)
        groups, _ = cut(ledger)
        assert len(groups) == 4
        ledger.installed(version)
        admissions = ledger.admit(0.0, PLENTY)
        assert Counter(view.task for view in ledger.snapshot().groups) == {0: 4, 1: 4}


# --- seeds -----------------------------------------------------------------------------------------


def test_a_group_shares_its_environment_seed_and_every_trajectory_has_a_sample_seed_of_its_own() -> None:
    ledger = make_ledger(seed=7)
    admissions = ledger.admit(0.0, PLENTY)
    assert {(a.group, a.env_seed) for a in admissions} == {(g, env_seed(7, g)) for g in range(4)}
    assert len({a.sample_seed for a in admissions}) == len(admissions)
    assert all(0 <= seed < 2**63 for a in admissions for seed in (a.env_seed, a.sample_seed))


def test_seeds_are_the_same_on_every_machine() -> None:
    assert env_seed(0, 0) == 7297857053641488786
    assert sample_seed(0, 0, 1, 0) == 9156970738095259221


# --- groups and batches ----------------------------------------------------------------------------


def test_a_batch_is_cut_only_when_enough_groups_are_complete() -> None:
    ledger = make_ledger()
    admissions = ledger.admit(0.0, PLENTY)
    finish(ledger, of_group(admissions, 0) + of_group(admissions, 1)[:1])
    assert ledger.cut_batch(0.0) is None
    finish(ledger, of_group(admissions, 1)[1:])
    assert cut(ledger) == ([0, 1], {})


def test_a_batch_is_in_order_of_group_then_member_whatever_the_order_of_finishing() -> None:
    ledger = make_ledger()
    finish(ledger, list(reversed(of_group(ledger.admit(0.0, PLENTY), 1, 3))))
    result = ledger.cut_batch(0.0)
    assert result is not None
    assert [(i.group, i.member, i.staleness) for i in result[0].items] == [
        (1, 0, 0),
        (1, 1, 0),
        (3, 0, 0),
        (3, 1, 0),
    ]


def test_groups_that_started_at_the_oldest_version_are_consumed_first() -> None:
    ledger = make_ledger(alpha=2)
    admissions = ledger.admit(0.0, PLENTY)
    finish(ledger, of_group(admissions, 0, 1))
    cut(ledger)
    finish(ledger, of_group(admissions, 2, 3), version=1)
    finish(ledger, of_group(admissions, 4, 5), version=0)
    assert cut(ledger)[0] == [4, 5]


def test_the_members_still_running_when_a_group_completes_are_surplus() -> None:
    ledger = make_ledger(redundant_members=2)
    members = of_group(ledger.admit(0.0, PLENTY), 0)
    assert len(members) == 4
    assert finish(ledger, members[1:3]) == [Cancel(members[0].trajectory, "surplus"), Cancel(3, "surplus")]
    assert ledger.snapshot().groups[0].complete


def test_redundant_groups_widen_the_window_and_those_left_over_go_least_progressed_first() -> None:
    ledger = make_ledger(redundant_groups=1)
    admissions = ledger.admit(0.0, PLENTY)
    assert groups_of(admissions) == [0, 1, 2, 3, 4, 5]
    finish(ledger, of_group(admissions, 1, 2))
    for started in of_group(admissions, 0, 3, 5):
        ledger.started(started.trajectory, 0)
    assert cut(ledger) == ([1, 2], {a.trajectory: "surplus" for a in of_group(admissions, 4)})


def test_under_alpha_0_all_that_is_left_over_of_a_version_is_surplus() -> None:
    ledger = make_ledger(alpha=0, mode="sync", redundant_groups=2)
    admissions = ledger.admit(0.0, PLENTY)
    finish(ledger, of_group(admissions, 0, 3) + of_group(admissions, 1)[:1])
    left_over = {a.trajectory: "surplus" for a in of_group(admissions, 1, 2)}
    assert cut(ledger) == ([0, 3], left_over)


# --- staleness -------------------------------------------------------------------------------------


def outrun(ledger: Ledger) -> list[Admission]:
    """Cut two batches that pass over group 0; return its members, which were admitted under version 0."""
    admissions = ledger.admit(0.0, PLENTY)
    finish(ledger, of_group(admissions, 1, 2))
    assert cut(ledger)[0] == [1, 2]
    ledger.installed(1)
    finish(ledger, of_group(admissions, 3))
    finish(ledger, of_group(ledger.admit(0.0, PLENTY), 4), version=1)
    return of_group(admissions, 0)


def test_work_in_flight_is_cancelled_at_the_cut_after_which_no_batch_may_hold_it() -> None:
    ledger = make_ledger()
    members = outrun(ledger)
    for member in members:
        assert ledger.started(member.trajectory, 0) == []
    assert cut(ledger) == ([3, 4], {member.trajectory: "stale" for member in members})
    assert 0 not in {view.group for view in ledger.snapshot().groups}


def test_what_has_not_started_is_not_stale() -> None:
    ledger = make_ledger()
    outrun(ledger)
    assert cut(ledger) == ([3, 4], {})


def test_a_start_reported_after_the_cut_that_made_it_stale_is_cancelled_then() -> None:
    ledger = make_ledger()
    first, second = outrun(ledger)
    cut(ledger)
    assert ledger.started(first.trajectory, 0) == [Cancel(first.trajectory, "stale")]
    assert ledger.finished(second.trajectory, 1.0, 1) == []
    (replacement,) = of_group(ledger.admit(0.0, PLENTY), 0)
    assert (replacement.member, replacement.attempt) == (0, 1)


def test_a_stale_finished_member_is_replaced_while_its_group_is_mostly_valid() -> None:
    ledger = make_ledger(group_size=3)
    first, second, third = outrun(ledger)
    ledger.finished(first.trajectory, 1.0, 0)
    ledger.finished(second.trajectory, 1.0, 1)
    ledger.started(third.trajectory, 1)
    assert cut(ledger) == ([3, 4], {first.trajectory: "stale"})
    assert [(a.member, a.attempt) for a in of_group(ledger.admit(0.0, PLENTY), 0)] == [(0, 1)]


def test_a_group_that_is_mostly_stale_is_dropped_whole() -> None:
    ledger = make_ledger(group_size=3)
    first, second, third = outrun(ledger)
    ledger.finished(first.trajectory, 1.0, 0)
    ledger.started(second.trajectory, 0)
    ledger.started(third.trajectory, 1)
    fate = {first.trajectory: "stale", second.trajectory: "stale", third.trajectory: "surplus"}
    assert cut(ledger) == ([3, 4], fate)


# --- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["env_failed", "reward_failed"])
def test_a_failed_member_is_replaced_after_a_back_off_and_its_group_goes_on(status: str) -> None:
    ledger = make_ledger(groups_per_batch=1, alpha=0)
    first, second = ledger.admit(0.0, PLENTY)
    assert ledger.failed(first.trajectory, status, "boom", now=5.0) == []  # type: ignore[arg-type]
    finish(ledger, [second])
    assert ledger.admit(5.9, PLENTY) == [] and ledger.next_wakeup(5.9) == 6.0
    (again,) = ledger.admit(6.0, PLENTY)
    assert (again.group, again.member, again.attempt) == (first.group, first.member, 1)
    assert again.env_seed == first.env_seed and again.sample_seed != first.sample_seed
    ledger.finished(again.trajectory, 0.5, 0)
    result = ledger.cut_batch(0.0)
    assert result is not None
    assert [item.trajectory for item in result[0].items] == [again.trajectory, second.trajectory]


def test_the_back_off_of_a_member_doubles_up_to_its_maximum() -> None:
    ledger = make_ledger(group_size=1, groups_per_batch=1, alpha=0, retry_attempts=9, backoff_max_s=5.0)
    now, waits = 0.0, []
    for _ in range(5):
        (admission,) = ledger.admit(now, PLENTY)
        ledger.failed(admission.trajectory, "env_failed", "boom", now)
        due = ledger.next_wakeup(now)
        assert due is not None
        waits.append(due - now)
        now = due
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_member_that_failed_too_often_takes_its_group_along_and_the_task_rests() -> None:
    ledger = make_ledger(groups_per_batch=1, alpha=0, retry_attempts=1)
    first, second = ledger.admit(0.0, PLENTY)
    assert fail_group(ledger, first, 0.0) == [Cancel(second.trajectory, "surplus")]
    assert ledger.admit(0.9, PLENTY) == [] and ledger.next_wakeup(0.9) == 1.0
    assert groups_of(ledger.admit(1.0, PLENTY)) == [1]


def test_a_member_given_up_costs_no_group_that_has_members_to_spare() -> None:
    ledger = make_ledger(groups_per_batch=1, alpha=0, retry_attempts=1, redundant_members=1)
    members = ledger.admit(0.0, PLENTY)
    assert fail_group(ledger, members[0], 0.0) == []
    finish(ledger, members[1:])
    assert ledger.cut_batch(0.0) is not None


def test_the_rest_of_a_task_doubles_until_a_group_of_it_is_complete() -> None:
    ledger = make_ledger(group_size=1, groups_per_batch=1, alpha=0, retry_attempts=1)
    now, rests = 0.0, []
    for outcome in "xxxox":
        (admission,) = ledger.admit(now, PLENTY)
        if outcome == "o":
            finish(ledger, [admission], ledger.version)
            cut(ledger)
            ledger.installed(ledger.step)
            continue
        fail_group(ledger, admission, now)
        wakeup = ledger.next_wakeup(now)
        assert wakeup is not None
        rests.append(wakeup - now)
        now = wakeup
    assert rests == [1.0, 2.0, 4.0, 1.0]


def test_while_a_task_rests_the_others_share_its_share() -> None:
    ledger = make_ledger(
        Task("broken", 9.0), Task("sound"), group_size=1, groups_per_batch=4, alpha=0, retry_attempts=1
    )
    for member in ledger.admit(0.0, PLENTY):
        if member.task == 0:
            fail_group(ledger, member, 0.0)
    assert {a.task for a in ledger.admit(0.0, PLENTY)} == {1}
    assert Counter(view.task for view in ledger.snapshot().groups) == {1: 4}


# --- one_off ---------------------------------------------------------------------------------------


def test_one_off_installs_only_when_all_admitted_work_has_finished() -> None:
    ledger = make_ledger(mode="one_off")
    admissions = ledger.admit(0.0, PLENTY)
    finish(ledger, of_group(admissions, 0, 1, 2))
    cut(ledger)
    assert not ledger.may_install(1)
    finish(ledger, of_group(admissions, 3))
    assert ledger.may_install(1)


def test_one_off_does_not_install_before_the_version_has_been_given_its_groups() -> None:
    ledger = make_ledger(mode="one_off")
    finish(ledger, ledger.admit(0.0, 6))
    cut(ledger)
    assert not ledger.may_install(1)


@pytest.mark.parametrize(("mode", "alpha"), [("async", 1), ("sync", 0)])
def test_other_modes_install_at_any_time(mode: str, alpha: int) -> None:
    ledger = make_ledger(mode=mode, alpha=alpha)
    ledger.admit(0.0, PLENTY)
    assert ledger.may_install(1)


# --- ends and crossings ----------------------------------------------------------------------------


def test_reports_about_a_cancelled_trajectory_are_ignored_and_its_cancel_stands() -> None:
    ledger = make_ledger(redundant_members=1)
    members = of_group(ledger.admit(0.0, PLENTY), 0)
    (cancel,) = finish(ledger, members[:2])
    before = ledger.counts()
    assert ledger.started(cancel.trajectory, 0) == []
    assert ledger.finished(cancel.trajectory, 1.0, 0) == []
    assert ledger.failed(cancel.trajectory, "env_failed", "boom", 0.0) == []
    assert ledger.counts() == before and before["surplus"] == 1


def test_shutdown_ends_all_open_work_as_surplus_and_admits_no_more() -> None:
    ledger = make_ledger()
    admissions = ledger.admit(0.0, PLENTY)
    finish(ledger, of_group(admissions, 0))
    assert {c.trajectory for c in ledger.shutdown()} == {a.trajectory for a in admissions}
    assert ledger.counts()["surplus"] == ledger.counts()["started"] == len(admissions)
    assert ledger.admit(0.0, PLENTY) == [] and ledger.next_wakeup(0.0) is None


def test_counts_are_kept_by_task() -> None:
    ledger = make_ledger(Task("a"), Task("b"), group_size=1, groups_per_batch=2, alpha=0)
    first, second = ledger.admit(0.0, PLENTY)
    ledger.failed(first.trajectory, "reward_failed", "boom", 0.0)
    finish(ledger, [second])
    assert (
        ledger.counts(first.task)["reward_failed"] == 1 and ledger.counts(second.task)["reward_failed"] == 0
    )
    assert ledger.counts()["started"] == 2


def test_waiting_for_names_the_groups_the_trajectories_and_the_last_failure() -> None:
    ledger = make_ledger(Task("maze"))
    first, second, *_ = ledger.admit(0.0, 3)
    ledger.started(second.trajectory, 0)
    ledger.failed(first.trajectory, "env_failed", "reset timed out", 1.0)
    said = ledger.waiting_for(8.0)
    assert "batch 0 needs 2 complete groups and has 0" in said
    assert "group 0 of task 'maze': 0 of 2 finished, 1 in flight, longest trajectory 1 (for 8.0 s" in said
    assert "last failure: reset timed out" in said


# --- what a driver may not do ----------------------------------------------------------------------


def test_contradictions_are_errors_that_name_the_trajectory() -> None:
    ledger = make_ledger()
    ledger.admit(0.0, 2)
    ledger.started(0, 0)
    with pytest.raises(ValueError, match="trajectory 7 was never admitted"):
        ledger.started(7, 0)
    with pytest.raises(ValueError, match="trajectory 1: no version 3 yet at step 0"):
        ledger.started(1, 3)
    with pytest.raises(ValueError, match="trajectory 0: reward nan is not finite"):
        ledger.finished(0, float("nan"), 0)
    ledger.finished(0, 1.0, 0)
    with pytest.raises(ValueError, match="trajectory 0 was reported finished twice"):
        ledger.finished(0, 1.0, 0)
    with pytest.raises(ValueError, match="installed version 1 is not within"):
        ledger.installed(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "sync"}, "mode 'sync' requires alpha 0, not 1"),
        ({"mode": "one_off", "alpha": 2}, "mode 'one_off' requires alpha 1, not 2"),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"alpha": -1}, "alpha must not be negative"),
        ({"share_patience": -1.0}, "share_patience must not be negative"),
        ({"backoff_s": 0.0}, "backoff_s must be positive"),
        ({"backoff_s": 90.0}, "at most backoff_max_s"),
    ],
)
def test_rules_that_cannot_work_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rules(**given)
