"""Trajectories as the trainer sees them, and their packing into micro-batches that fit in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sample:
    """One trajectory to train on: its tokens exactly as they were sampled, never re-tokenised.

    Attributes
    ----------
    trajectory, group, task
        Identity; members of one group share `group`.
    reward
        Of the whole trajectory.
    tokens
        int32 (T,), context and sampled tokens in order.
    logprobs
        float32 (T,), the engine's log-prob of each sampled token; anything (NaN) elsewhere.
    versions
        int32 (T,), the weight version that sampled each token; -1 elsewhere.
    sampled
        uint8 (T,), 1 where the policy sampled the token: the loss mask.
    temperature
        The engine's at sampling, above 0.

    Raises
    ------
    ValueError
        If the arrays disagree, nothing was sampled, the first token was (it has no context to be sampled
        from), a sampled token's log-prob is not finite, or the temperature is not above 0.
    """

    trajectory: int
    group: int
    task: int
    reward: float
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    sampled: np.ndarray
    temperature: float = 1.0

    def __post_init__(self) -> None:
        name = f"trajectory {self.trajectory}"
        shapes = {a.shape for a in (self.tokens, self.logprobs, self.versions, self.sampled)}
        if shapes != {(self.tokens.size,)}:
            raise ValueError(f"{name}: arrays differ in shape: {sorted(shapes)}")
        mask = self.sampled.astype(bool)
        if not mask.any():
            raise ValueError(f"{name}: holds no sampled token, so there is nothing to train on")
        if mask[0]:
            raise ValueError(f"{name}: its first token is marked sampled, but nothing precedes it")
        if not np.isfinite(self.logprobs[mask]).all():
            raise ValueError(f"{name}: the engine's log-prob of a sampled token is not finite")
        if not np.isfinite(self.reward):
            raise ValueError(f"{name}: its reward is {self.reward}")
        if not self.temperature > 0:
            raise ValueError(f"{name}: sampled at temperature {self.temperature}; training needs more than 0")

    @property
    def trained_length(self) -> int:
        """Tokens up to the last sampled one: what follows it influences nothing."""
        return int(np.flatnonzero(self.sampled)[-1]) + 1

    @property
    def sampled_count(self) -> int:
        """How many tokens the policy sampled."""
        return int(np.count_nonzero(self.sampled))


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some trajectories, right-padded, and flat vectors over their S sampled tokens.

    Right padding with causal attention needs no mask: no real token ever attends to what comes after it.

    Attributes
    ----------
    input_ids
        int64 (rows, length).
    positions
        int64 (S,): index into the flattened (rows * length) hidden states of the position that *predicts*
        each sampled token, the one just before it. Logits are computed there and nowhere else.
    targets
        int64 (S,): the sampled tokens.
    behaviour
        float32 (S,): the engine's log-probs.
    temperature, advantages
        float32 (S,): each token's trajectory's.
    """

    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    behaviour: Tensor
    temperature: Tensor
    advantages: Tensor


def micro_batches(samples: Sequence[Sample], advantages: np.ndarray, token_budget: int) -> list[MicroBatch]:
    """Pack `samples` into micro-batches of at most `token_budget` tokens, padding included.

    Sorted by length first, so that little is padding; ties keep their order, so the result is a function
    of the input alone. A trajectory longer than the budget gets a micro-batch of its own.

    Parameters
    ----------
    samples
        In any order.
    advantages
        float32 (len(samples),).
    token_budget
        Upper bound of rows * length.
    """
    order = sorted(range(len(samples)), key=lambda i: samples[i].trained_length)
    batches: list[MicroBatch] = []
    rows: list[int] = []
    for i in order:
        if rows and (len(rows) + 1) * samples[i].trained_length > token_budget:
            batches.append(_pack(samples, advantages, rows))
            rows = []
        rows.append(i)
    if rows:
        batches.append(_pack(samples, advantages, rows))
    return batches


def _pack(samples: Sequence[Sample], advantages: np.ndarray, rows: list[int]) -> MicroBatch:
    length = max(samples[i].trained_length for i in rows)
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    positions, targets, behaviour, temperature, token_advantages = [], [], [], [], []
    for row, i in enumerate(rows):
        sample = samples[i]
        input_ids[row, : sample.trained_length] = sample.tokens[: sample.trained_length]
        where = np.flatnonzero(sample.sampled)
        positions.append(row * length + where - 1)
        targets.append(sample.tokens[where].astype(np.int64))
        behaviour.append(sample.logprobs[where].astype(np.float32))
        temperature.append(np.full(where.size, sample.temperature, dtype=np.float32))
        token_advantages.append(np.full(where.size, advantages[i], dtype=np.float32))
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(np.concatenate(positions)),
        targets=torch.from_numpy(np.concatenate(targets)),
        behaviour=torch.from_numpy(np.concatenate(behaviour)),
        temperature=torch.from_numpy(np.concatenate(temperature)),
        advantages=torch.from_numpy(np.concatenate(token_advantages)),
    )
