"""Packing trajectories into micro-batches."""

from dataclasses import replace

import numpy as np
import pytest

from hpc_rollart.train.batch import Sample, micro_batches


def sample(trajectory: int, tokens: list[int], sampled: list[int], temperature: float = 1.0) -> Sample:
    mask = np.array(sampled, np.uint8)
    return Sample(
        trajectory=trajectory,
        group=0,
        task=0,
        reward=1.0,
        tokens=np.array(tokens, np.int32),
        logprobs=np.where(mask == 1, -0.1 * trajectory, np.nan).astype(np.float32),
        versions=np.where(mask == 1, 3, -1).astype(np.int32),
        sampled=mask,
        temperature=temperature,
    )


def test_positions_predict_exactly_the_sampled_tokens() -> None:
    a = sample(1, [5, 6, 7, 8, 9], [0, 1, 0, 1, 1], temperature=0.7)
    b = sample(2, [1, 2, 3], [0, 0, 1])
    (batch,) = micro_batches([a, b], np.array([0.5, -1.0], np.float32), token_budget=100)
    # Sorted by length: b is row 0, padded from 3 to 5; a is row 1 and starts at flat index 5.
    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 0], [5, 6, 7, 8, 9]]
    assert batch.positions.tolist() == [1, 5, 7, 8]
    assert batch.targets.tolist() == [3, 6, 8, 9]
    assert batch.behaviour.tolist() == pytest.approx([-0.2, -0.1, -0.1, -0.1])
    assert batch.advantages.tolist() == [-1.0, 0.5, 0.5, 0.5]
    assert batch.temperature.tolist() == pytest.approx([1.0, 0.7, 0.7, 0.7])


def test_tokens_after_the_last_sampled_one_are_left_out() -> None:
    (batch,) = micro_batches([sample(1, [1, 2, 3, 4], [0, 1, 0, 0])], np.ones(1, np.float32), 100)
    assert batch.input_ids.tolist() == [[1, 2]]


def test_micro_batches_keep_the_token_budget_padding_included() -> None:
    lengths = [3, 9, 4, 4, 12, 5]
    samples = [sample(i, [1] * n, [0] * (n - 1) + [1]) for i, n in enumerate(lengths)]
    batches = micro_batches(samples, np.ones(6, np.float32), token_budget=12)
    assert [tuple(b.input_ids.shape) for b in batches] == [(3, 4), (1, 5), (1, 9), (1, 12)]
    assert sum(b.targets.numel() for b in batches) == 6


def test_a_trajectory_longer_than_the_budget_goes_alone() -> None:
    samples = [sample(1, [1] * 30, [0] * 29 + [1]), sample(2, [1] * 3, [0, 0, 1])]
    batches = micro_batches(samples, np.ones(2, np.float32), token_budget=8)
    assert [tuple(b.input_ids.shape) for b in batches] == [(1, 3), (1, 30)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampled": np.zeros(3, np.uint8)}, "no sampled token"),
        ({"sampled": np.array([1, 0, 1], np.uint8)}, "first token"),
        ({"logprobs": np.array([0, 0, np.nan], np.float32)}, "not finite"),
        ({"versions": np.zeros(2, np.int32)}, "differ in shape"),
        ({"temperature": 0.0}, "temperature"),
        ({"reward": float("nan")}, "reward"),
    ],
)
def test_a_malformed_trajectory_is_refused_by_name(change: dict, message: str) -> None:
    good = sample(17, [1, 2, 3], [0, 0, 1])
    with pytest.raises(ValueError, match=f"trajectory 17.*{message}"):
        replace(good, **change)
