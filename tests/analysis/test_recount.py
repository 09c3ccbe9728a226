"""The audit passes sound runs and finds each kind of planted violation, and only that."""

import shutil
from pathlib import Path

import pytest

from hpc_rollart.analysis.recount import audit
from hpc_rollart.analysis.rundir import open_run_dir
from hpc_rollart.analysis.summary import summarise
from hpc_rollart.store.files import StoreError
from tests.analysis.fake_run import make_run

STEPS = 8
# What is planted, and the check that must find it (others may see its consequences, too).
PLANTS = {
    "stale": ("staleness within alpha", "started at version 2, trained on from 5 (alpha 1)"),
    "staleness_logged": ("staleness within alpha", "logged as"),
    "double": ("consumed at most once", "was consumed 2 times, in steps [3, 3]"),
    "missing_row": ("one row a trajectory", "has no row"),
    "two_rows": ("one row a trajectory", "has 2 rows"),
    "reward": ("metrics agree with shards", "reward of frozen-lake"),
    "consumed_failure": ("a failure is not a reward", "its status is env_failed"),
    "torn_group": ("complete groups", "consumed 3 of group"),
    "untrue_version": ("tokens carry versions", "its tokens say"),
}


def test_a_sound_run_passes_every_check(tmp_path: Path):
    found = audit(make_run(tmp_path, STEPS))
    assert found.problems == []
    assert found.notes == []
    counts = {check.name: check.checked for check in found.checks}
    assert counts["staleness within alpha"] == STEPS * 16
    assert counts["complete groups"] == STEPS * 4
    assert counts["metrics agree with shards"] == STEPS
    assert counts["one row a trajectory"] >= STEPS * 16
    assert "WRONG" not in found.table()


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_violation_is_found_and_named(tmp_path: Path, plant: str):
    found = audit(make_run(tmp_path, STEPS, plant=plant))
    check, words = PLANTS[plant]
    (wrong,) = [one for one in found.checks if one.name == check]
    assert any(words in problem for problem in wrong.problems), found.problems
    assert f"{len(wrong.problems)} WRONG" in found.table()
    assert words in found.table()


def test_a_run_that_was_killed_is_not_blamed_for_what_it_could_not_write(tmp_path: Path):
    make_run(tmp_path, STEPS, state="running", plant="missing_row")
    found = audit(tmp_path)
    assert found.problems == []
    assert any("in flight" in note for note in found.notes)


def test_a_run_that_was_killed_is_still_held_to_what_it_wrote(tmp_path: Path):
    found = audit(make_run(tmp_path, STEPS, state="running", plant="stale"))
    assert any("trained on from 5" in problem for problem in found.problems)


def test_a_run_without_steps_passes_with_a_note_that_nothing_was_compared(tmp_path: Path):
    found = audit(make_run(tmp_path, 0))
    assert found.problems == []
    assert "no metrics.jsonl: rewards were not compared" in found.notes


def test_a_step_that_no_batch_log_has_is_a_problem(tmp_path: Path):
    make_run(tmp_path, STEPS)
    shutil.rmtree(tmp_path / "batches")
    problems = audit(tmp_path).problems
    assert (
        f"metrics agree with shards: step {STEPS - 1}: in metrics.jsonl, but no batch log has it" in problems
    )


def test_a_shard_that_cannot_be_read_is_noted_and_its_rows_are_missed(tmp_path: Path):
    make_run(tmp_path, STEPS)
    (tmp_path / "trajectories" / "env-4-0.h5").write_bytes(b"not HDF5")
    found = audit(tmp_path)
    assert any("env-4-0.h5" in note for note in found.notes)
    assert any("has no row" in problem for problem in found.problems)


def test_a_directory_without_shards_is_one_clear_error(tmp_path: Path):
    with pytest.raises(StoreError, match="no run directory"):
        audit(tmp_path)


def test_steps_that_a_later_attempt_did_anew_count_once(tmp_path: Path):
    found = audit(make_run(tmp_path, STEPS, resumed_at=3))
    assert found.problems == []
    assert {check.name: check.checked for check in found.checks}["staleness within alpha"] == STEPS * 16
    assert found.attempts == [
        "attempt 0: began at step 0, steps 0 to 2, killed; 32 trajectories of 2 steps rolled back",
        f"attempt 1: began at step 3, steps 3 to {STEPS - 1}, done",
    ]
    assert found.attempts[0] in found.table()


def test_what_was_in_flight_when_an_attempt_was_killed_may_lack_its_row_and_a_clean_end_may_not(
    tmp_path: Path,
):
    # Planted in the step before the second attempt began: its row should have been on disk by then.
    found = audit(make_run(tmp_path / "killed", STEPS, resumed_at=4, plant="missing_row"))
    wrong = {problem.split(":")[0] for problem in found.problems}
    assert "staleness within alpha" in wrong and "one row a trajectory" not in wrong
    path = make_run(tmp_path / "clean", STEPS, resumed_at=4)
    (path / "logs" / "0" / "end.json").write_text('{"state": "interrupted", "step": 4, "started": 10000}')
    assert any("10000 trajectories were started in attempt 0" in p for p in audit(path).problems)


def test_a_step_that_is_in_metrics_twice_or_not_at_all_is_found(tmp_path: Path):
    make_run(tmp_path, STEPS)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:3], *lines[2:]]) + "\n")
    assert any(
        "line 4 of metrics.jsonl is of step 2, not 3" in problem for problem in audit(tmp_path).problems
    )


def test_a_failure_of_an_earlier_attempt_is_not_the_runs(tmp_path: Path):
    path = make_run(tmp_path, STEPS, resumed_at=3)
    (path / "logs" / "0" / "failure.json").write_text('{"error": "a node went down"}')
    run = open_run_dir(path)
    assert (run.state, run.failure) == ("done", None)
    assert [attempt.state for attempt in run.attempts] == ["failed", "done"]
    assert summarise(run).statuses["rolled back"] == 32
    assert summarise(run).trained == STEPS * 16
