"""Messages arrive whole, in order, in time or with an error that says whose fault it is."""

from pathlib import Path

import pytest

from tests.fabric.mpi_run import run_mpi

PROGRAMS = Path(__file__).parent / "programs"
TALK = PROGRAMS / "talk.py"


def test_structs_with_arrays_of_any_size_and_dtype_come_back_unchanged() -> None:
    assert "all the same" in run_mpi(2, TALK, "arrays").stdout


def test_a_small_message_does_not_overtake_a_large_one() -> None:
    assert "in order" in run_mpi(2, TALK, "order").stdout


def test_a_missed_deadline_names_the_thing_the_rank_and_its_host() -> None:
    out = run_mpi(2, TALK, "deadline").stdout
    assert "DeadlineExceeded: the weather: nothing from rank 1 (generate-1 on " in out
    assert "within 0.3 s" in out


def test_answers_may_be_given_late_and_in_any_order() -> None:
    assert "each its own" in run_mpi(2, TALK, "later").stdout


def test_a_rank_can_write_to_itself() -> None:
    assert run_mpi(2, TALK, "alone").stdout.count("heard itself") == 2


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_handler_raises_comes_out_of_run_and_failed(kind: str) -> None:
    run = run_mpi(2, TALK, "handler_error", kind, check=False)
    assert "surfaced: no use for 7" in run.stdout
    assert run.returncode == 1 and "LookupError: no use for 7" in run.stderr


def test_a_message_without_a_handler_is_an_error_that_names_its_sender() -> None:
    out = run_mpi(2, TALK, "unhandled", check=False).stdout
    assert "surfaced: no handler for the message Ping from env-0 on " in out


def test_drain_gives_up_on_a_rank_that_takes_nothing_and_names_it() -> None:
    out = run_mpi(2, TALK, "drain").stdout
    assert "DeadlineExceeded: taking the messages sent to it: nothing from rank 1 (generate-1 on " in out


def test_a_killed_rank_is_reported_by_name_and_the_living_go_on() -> None:
    out = run_mpi(3, PROGRAMS / "loss.py", check=False).stdout
    assert "RankLost: a last word: rank 2 (generate-2 on " in out
    assert "not asked again" in out
    assert "rank 0 went on" in out and "rank 1 went on" in out


def test_an_idle_rank_leaves_its_core_to_others() -> None:
    shares = [float(line.split()[1]) for line in run_mpi(2, PROGRAMS / "idle.py").stdout.splitlines()]
    # Measured: 0.02 on a quiet machine, 0.05 on one that is full. A rank that polls without a pause has 1.0.
    assert len(shares) == 2 and max(shares) < 0.2, shares
