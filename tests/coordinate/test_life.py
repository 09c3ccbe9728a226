"""A silent rank is noticed after the limit, and a coordinator that was held up blames nobody for it."""

from hpc_rollart.coordinate.life import LifeSigns


def watch(life: LifeSigns, start: float, seconds: float, speaking: tuple[int, ...] = ()) -> set[int]:
    """Look every half second; the ranks in `speaking` are heard of each time."""
    silent: set[int] = set()
    for half in range(int(2 * seconds)):
        for rank in speaking:
            life.heard(rank)
        silent |= life.silent(start + half / 2)
    return silent


def test_a_rank_is_silent_after_the_limit_and_not_before() -> None:
    life = LifeSigns(60.0)
    life.heard(1)
    life.heard(2)
    assert watch(life, 0.0, 59.0, speaking=(2,)) == set()
    assert watch(life, 59.0, 3.0, speaking=(2,)) == {1}


def test_ranks_that_never_spoke_or_took_their_leave_are_not_expected_to() -> None:
    life = LifeSigns(60.0)
    life.heard(1)
    life.forget(1)
    assert watch(life, 0.0, 300.0) == set()


def test_a_coordinator_that_was_held_up_has_not_heard_the_others_meanwhile() -> None:
    life = LifeSigns(60.0)
    life.heard(1)
    assert watch(life, 0.0, 20.0) == set()
    assert life.silent(500.0) == set()
    life.heard(1)
    assert watch(life, 500.5, 50.0) == set()
