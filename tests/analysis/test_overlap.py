"""Overlap is a matter of interval arithmetic, checked by hand and against a count on a grid."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rollart.analysis.overlap import (
    attempts,
    intersect,
    measure,
    merge,
    overlap,
    seconds,
    time_by_category,
    union,
)
from hpc_rollart.observe.timeline import Timeline
from hpc_rollart.observe.trace import Event

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


def events(spans, cat="train", name="x"):
    return [Event(name, cat, float(start), float(length), {}) for start, length in sorted(spans)]


def grid(spans) -> np.ndarray:
    """Which of the unit cells of [0, 80) are covered."""
    covered = np.zeros(80, bool)
    for start, length in spans:
        covered[start : start + length] = True
    return covered


@given(intervals, intervals)
def test_union_and_intersection_agree_with_a_grid(a, b):
    first, second = union(events(a)), union(events(b))
    assert seconds(first) == grid(a).sum()
    assert seconds(merge(first, second)) == (grid(a) | grid(b)).sum()
    assert seconds(intersect(first, second)) == (grid(a) & grid(b)).sum()


@given(*[intervals] * 4)
def test_overlap_agrees_with_a_grid(train, weights, one, two):
    timelines = {
        ("trainer", 0): events(train) + events(weights, "weights"),
        ("generate", 1): events(one, "generate"),
        ("generate", 2): events(two, "generate"),
    }
    found = measure(timelines)
    covered = grid(train) | grid(weights)
    assert found.generate_s == grid(one).sum() + grid(two).sum()
    assert found.overlapped_s == (grid(one) & covered).sum() + (grid(two) & covered).sum()
    assert found.overlapped_train_s == (grid(one) & grid(train)).sum() + (grid(two) & grid(train)).sum()


@given(*[intervals] * 3)
def test_every_second_of_a_rank_is_counted_once(train, weights, wait):
    timelines = {
        ("trainer", 0): events(train) + events(weights, "weights") + events(wait, "wait"),
        ("env", 1): events([(0, 80)], "env"),
    }
    times = time_by_category(timelines)
    assert times["trainer", 0]["train"] == grid(train).sum()
    assert times["trainer", 0]["weights"] == (grid(weights) & ~grid(train)).sum()
    assert times["trainer", 0]["wait"] == (grid(wait) & ~grid(weights) & ~grid(train)).sum()
    assert sum(times["trainer", 0].values()) == sum(times["env", 1].values()) == 80


def test_overlap_is_read_from_the_run_directory(tmp_path: Path):
    with Timeline(tmp_path / "timeline", "trainer", 0) as line:
        line.event("train", "train", 100.0, 4.0)
        line.event("broadcast", "weights", 104.0, 1.0)
    with Timeline(tmp_path / "timeline", "generate", 1) as line:
        line.event("generate", "generate", 102.0, 6.0)
        line.event("install", "weights", 108.0, 0.25)
        line.event("recompute", "weights", 108.25, 0.25)
    found = overlap(tmp_path)
    assert (found.generate_s, found.overlapped_s, found.fraction) == (6.0, 3.0, 0.5)
    assert (found.train_s, found.weights_s, found.exposed_s, found.wall_s) == (4.0, 1.5, 0.5, 8.5)
    assert found.generators == {("generate", 1): (6.0, 3.0)}


def test_a_run_without_timelines_has_no_overlap(tmp_path: Path):
    found = overlap(tmp_path)
    assert found.generate_s == 0
    assert found.fraction != found.fraction
    assert time_by_category({}) == {}
    assert pytest.approx(0) == found.wall_s


def test_the_time_between_two_attempts_belongs_to_neither():
    def marker(number: int, t: float) -> Event:
        return Event("attempt", "wait", t, 0.0, {"attempt": number})

    timelines = {
        ("trainer", 0): [marker(0, 0.0), *events([(2, 3)]), marker(1, 1000.0), *events([(1005, 5)])],
        ("env", 1): [marker(0, 1.0), *events([(4, 4)], "env"), marker(1, 999.0), *events([(1004, 1)], "env")],
    }
    assert attempts(timelines).tolist() == [[2.0, 8.0], [1004.0, 1010.0]]
    assert measure(timelines).wall_s == 12.0
    assert sum(time_by_category(timelines)["trainer", 0].values()) == 12.0
