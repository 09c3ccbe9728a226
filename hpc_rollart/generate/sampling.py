"""Draws tokens from logits such that a draw depends on nothing but its own row, seed and position."""

from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, eq=False)
class Draws:
    """Settings of one token of each of n rows, as arrays of shape (n,).

    Attributes
    ----------
    temperature, top_p
        float32. Temperature 0 takes the most likely token; top_p 1 is off.
    top_k
        int64; 0 is off.
    seed
        uint64.
    position
        uint64: index of the token in its trajectory.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    seed: np.ndarray
    position: np.ndarray


def uniforms(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Counter-based random numbers: a pure function of (seed, position).

    Parameters
    ----------
    seed, position
        uint64, shape (n,).

    Returns
    -------
    numpy.ndarray
        float64, shape (n,), strictly between 0 and 1: the `position`-th output of the SplitMix64 stream
        whose starting point is the hashed seed, so that neighbouring seeds share no stream.
    """
    bits = _mix(_mix(seed + _GOLDEN) + (position + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def sample(logits: torch.Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token a row by inverting the cumulative distribution.

    Parameters
    ----------
    logits
        Shape (n, vocabulary), any floating dtype; computed with in float32, summed in float64.
    draws
        Settings of the n rows.

    Returns
    -------
    tokens, logprobs
        int32 and float32, shape (n,). The log-prob is under the distribution drawn from: after temperature,
        then top-k, then top-p. A greedy row's is 0, for it is drawn from a point mass. Where the logits hold
        a NaN or +inf the log-prob is NaN: the caller must check.
    """
    device = logits.device
    greedy = draws.temperature == 0
    any_greedy = bool(greedy.any())
    temperature = np.where(greedy, np.float32(1), draws.temperature) if any_greedy else draws.temperature
    scaled = logits.float() / torch.from_numpy(temperature).to(device)[:, None]
    truncated = np.flatnonzero(~greedy & ((draws.top_k > 0) | (draws.top_p < 1)))
    if truncated.size:
        rows = torch.from_numpy(truncated).to(device)
        scaled[rows] = _truncate(
            scaled[rows],
            torch.from_numpy(draws.top_k[truncated]).to(device),
            torch.from_numpy(draws.top_p[truncated]).to(device),
        )
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # `uniforms` stays so far below 1 that the product rounds below the total; and the first entry
    # *above* the target always belongs to a token of non-zero probability.
    target = torch.from_numpy(uniforms(draws.seed, draws.position)).to(device) * cumulative[:, -1]
    chosen = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=logits.shape[1] - 1)
    if any_greedy:
        is_greedy = torch.from_numpy(greedy).to(device)[:, None]
        chosen = torch.where(is_greedy, scaled.argmax(-1, keepdim=True), chosen)
    picked = logprobs.gather(1, chosen)[:, 0].cpu().numpy()
    picked[greedy & np.isfinite(picked)] = 0.0
    return chosen[:, 0].to(torch.int32).cpu().numpy(), picked


def _truncate(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf all but the `top_k` likeliest tokens and, of those, the smallest set of mass `top_p`.

    Equal logits keep the lower token id first. The likeliest token always stays.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    ordered.masked_fill_((top_k[:, None] > 0) & (rank >= top_k[:, None]), -torch.inf)
    mass_before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    mass_before[:, 0] = 0.0
    # The float32 sum may reach 1 before the last token does: top_p 1 must still drop nothing.
    ordered.masked_fill_((mass_before >= top_p[:, None]) & (top_p[:, None] < 1) & (rank > 0), -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def _mix(x: np.ndarray) -> np.ndarray:
    """Finalizer of SplitMix64 (Steele, Lea and Flood, 2014), uint64 to uint64."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
