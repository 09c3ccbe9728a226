"""No version is served torn; what cannot arrive ends in an error that names the rank."""

from pathlib import Path

from tests.fabric.mpi_run import run_mpi

PROGRAM = Path(__file__).parent / "programs" / "sync.py"


def play(scene: str, check: bool = True) -> str:
    """What the three ranks of a scene wrote."""
    return run_mpi(3, PROGRAM, scene, check=check, timeout=120).stdout


def test_many_versions_in_a_row_arrive_bit_exact() -> None:
    assert play("many").count("thirty versions, bit-exact") == 2


def test_a_corrupted_bucket_is_never_served_and_the_version_is_repeated() -> None:
    out = play("corrupt_once")
    assert "version 2 was repeated" in out
    assert out.count("each version once, in order") == 2


def test_a_repeat_for_another_receiver_leaves_a_version_that_waits_for_its_install_untouched() -> None:
    assert "the held version stayed whole" in play("held")


def test_a_version_corrupted_twice_is_an_error_that_names_the_receiver_which_keeps_the_old_one() -> None:
    out = play("corrupt_twice")
    assert "WeightSyncError: version 2 arrived corrupted 2 times: rank 1 (generate-1 on " in out
    assert "the checksum of bucket 0 of version 2 does not match its bytes" in out
    assert "rank 1 serves 1" in out and "rank 0 serves 2" in out


def test_a_receiver_that_never_answers_is_named_after_the_deadline() -> None:
    out = play("silent_receiver")
    assert "WeightSyncError: receiving version 1 of the weights: rank 1 (generate-1 on " in out
    assert ": not within 1 s" in out


def test_a_broadcast_that_never_ends_names_the_sender() -> None:
    out = play("silent_sender")
    assert (
        out.count("WeightSyncError: version 1 of the weights did not arrive whole from rank 2 (trainer-2")
        == 2
    )


def test_a_receiver_with_another_plan_is_named_before_any_weight_travels() -> None:
    out = play("other_plan")
    assert "WeightSyncError: the model of rank 1 (generate-1 on " in out
    assert "has other tensors or buckets than the trainer's" in out


def test_a_receiver_that_dies_is_named_at_once() -> None:
    out = play("lost_receiver", check=False)
    assert "rank 1 (generate-1 on " in out and "was lost" in out
