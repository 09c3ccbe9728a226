"""Draws follow the distribution that their log-probs claim, and depend on nothing else."""

import numpy as np
import pytest
import torch

from hpc_rollart.generate.sampling import Draws, sample, uniforms


def draws(n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> Draws:
    return Draws(
        temperature=np.full(n, temperature, np.float32),
        top_p=np.full(n, top_p, np.float32),
        top_k=np.full(n, top_k, np.int64),
        seed=np.full(n, seed, np.uint64),
        position=np.arange(n, dtype=np.uint64),
    )


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic, as standard deviations from its mean."""
    expected = counts.sum() * probabilities[probabilities > 0]
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    freedom = expected.size - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def test_uniforms_are_flat_and_uncorrelated_along_positions_and_along_seeds() -> None:
    grid = np.arange(200, dtype=np.uint64)
    seeds, positions = (axis.ravel() for axis in np.meshgrid(grid, grid, indexing="ij"))
    u = uniforms(seeds, positions)
    assert u.min() > 0 and u.max() < 1
    assert abs(chi_square(np.histogram(u, 64, (0, 1))[0], np.full(64, 1 / 64))) < 4
    table = u.reshape(200, 200)
    for a, b in ((table[:, 1:], table[:, :-1]), (table[1:], table[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)
    assert np.unique(u).size == u.size


def test_seeds_use_all_64_bits() -> None:
    seeds = np.array([1, 1 + (1 << 63), 1 + (1 << 32)], np.uint64)
    assert np.unique(uniforms(seeds, np.zeros(3, np.uint64))).size == 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_the_softmax_at_that_temperature(temperature: float) -> None:
    logits = torch.linspace(-2, 2, 12)
    n = 40_000
    tokens, logprobs = sample(logits.expand(n, -1), draws(n, temperature))
    probabilities = (logits.double() / temperature).softmax(-1).numpy()
    assert abs(chi_square(np.bincount(tokens, minlength=12), probabilities)) < 4
    np.testing.assert_allclose(logprobs, np.log(probabilities)[tokens], atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, [0.4, 0.3]),
        (0, 0.75, [0.4, 0.3, 0.2]),  # 0.4 + 0.3 is not enough
        (0, 0.69, [0.4, 0.3]),
        (0, 1e-6, [0.4]),
        (3, 0.7, [0.4, 0.3]),  # of the renormalised three, 0.44 + 0.33 is enough
        (99, 1.0, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_truncation_keeps_the_smallest_likeliest_set_and_renormalises(
    top_k: int, top_p: float, kept: list[float]
) -> None:
    order = [2, 0, 3, 1]
    logits = torch.log(torch.tensor([0.3, 0.1, 0.4, 0.2]))
    n = 20_000
    tokens, logprobs = sample(logits.expand(n, -1), draws(n, top_p=top_p, top_k=top_k))
    probabilities = np.zeros(4)
    probabilities[order[: len(kept)]] = np.array(kept) / sum(kept)
    counts = np.bincount(tokens, minlength=4)
    assert not counts[probabilities == 0].any()
    if len(kept) > 1:
        assert abs(chi_square(counts, probabilities)) < 4
    np.testing.assert_allclose(logprobs, np.log(probabilities[tokens]), atol=1e-5)


def test_equal_logits_are_truncated_to_exactly_k() -> None:
    tokens, _ = sample(torch.zeros(500, 8), draws(500, top_k=3))
    assert set(tokens.tolist()) == {0, 1, 2}


def test_temperature_zero_takes_the_most_likely_token_with_log_prob_zero() -> None:
    logits = torch.randn(50, 30, generator=torch.manual_seed(1))
    tokens, logprobs = sample(logits, draws(50, temperature=0.0, top_k=5))
    np.testing.assert_array_equal(tokens, logits.argmax(-1).numpy())
    assert not logprobs.any()


def test_a_row_does_not_depend_on_its_neighbours_settings() -> None:
    logits = torch.randn(6, 40, generator=torch.manual_seed(2))
    mixed = Draws(
        temperature=np.array([1, 0, 0.7, 1, 2, 1], np.float32),
        top_p=np.array([1, 1, 0.9, 0.5, 1, 1], np.float32),
        top_k=np.array([0, 0, 0, 4, 7, 1], np.int64),
        seed=np.arange(6, dtype=np.uint64),
        position=np.arange(6, dtype=np.uint64) * np.uint64(3),
    )
    tokens, logprobs = sample(logits, mixed)
    for i in range(6):
        alone = Draws(*(getattr(mixed, name)[i : i + 1] for name in Draws.__dataclass_fields__))
        token, logprob = sample(logits[i : i + 1], alone)
        assert token[0] == tokens[i]
        assert logprob[0] == pytest.approx(logprobs[i], abs=1e-5)


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    tokens, _ = sample(logits.expand(5000, -1), draws(5000))
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_a_nan_log_prob(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = bad
    _, logprobs = sample(logits, draws(2, temperature))
    assert np.isnan(logprobs).tolist() == [False, True]


def test_bfloat16_logits_are_computed_with_in_float32() -> None:
    logits = torch.randn(20, 300, generator=torch.manual_seed(3)).bfloat16()
    tokens, logprobs = sample(logits, draws(20))
    exact = logits.float().log_softmax(-1).numpy()[np.arange(20), tokens]
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(logprobs, exact)
