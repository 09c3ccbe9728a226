"""The seam between a generator rank and whatever samples its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from hpc_rollart.messages import Sampling

StopReason = Literal["eos", "max_tokens", "max_context"]


@dataclass(frozen=True, eq=False)
class Request:
    """Sample one turn of one trajectory.

    Attributes
    ----------
    trajectory, turn
        Identity; a trajectory has at most one request in the engine at a time.
    tokens
        int32, shape (T,), T >= 1: the whole context so far, earlier turns included.
    sampling
        How this request's tokens are drawn.
    seed
        With a token's absolute position in the trajectory, decides the draw of that token; so a request
        that is restarted or moved to another replica draws the same numbers.
    """

    trajectory: int
    turn: int
    tokens: np.ndarray
    sampling: Sampling
    seed: int


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled turn.

    Attributes
    ----------
    trajectory, turn
        The request's identity.
    tokens, logprobs, versions
        int32, float32 and int32, each of shape (S,). A log-prob is that of the distribution the token was
        drawn from, after temperature and truncation; a version is that of the weights that sampled it.
        S is 0 only when the context left no room for a token.
    stop
        `eos` (the end token is the last of `tokens`), `max_tokens` or `max_context`, tested in this order.
    seconds
        From `add` to the end, waiting included.
    """

    trajectory: int
    turn: int
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop: StopReason
    seconds: float


@dataclass
class StepResult:
    """What one step did.

    Attributes
    ----------
    completions
        Requests that ended in this step.
    first_tokens
        (trajectory, version) of the turn-0 requests whose first token was sampled in this step.
    sampled
        Tokens sampled.
    processed
        Tokens that went through the model.
    recomputed
        Those of `processed` that had been processed before under older weights.
    """

    completions: list[Completion] = field(default_factory=list)
    first_tokens: list[tuple[int, int]] = field(default_factory=list)
    sampled: int = 0
    processed: int = 0
    recomputed: int = 0


class Engine(Protocol):
    """Samples tokens for many requests at once; single-threaded, driven by calling `step` in a loop."""

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""

    @property
    def running(self) -> int:
        """Requests that hold a slot."""

    @property
    def waiting(self) -> int:
        """Requests in the queue."""

    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        ValueError
            If the context is empty or holds an id outside the vocabulary, the sampling settings are
            impossible, or the trajectory already has a request here.
        """

    def abort(self, trajectory: int) -> None:
        """Forget the trajectory's request, without a completion, and its KV; harmless if unknown."""

    def end(self, trajectory: int) -> None:
        """Drop what is kept for later turns of a trajectory that has none; harmless if unknown."""

    def step(self) -> StepResult:
        """Run the model once; each request whose context is complete samples one token."""

    def install(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace the weights between two steps.

        The tensors are copied, and cast to the model's dtype. KV caches stay as they are until
        `recompute` is called.

        Raises
        ------
        ValueError
            If names or shapes are not exactly the model's; nothing has then been changed.
        """

    def recompute(self) -> int:
        """Have all KV rebuilt under the current weights before another token is sampled from it.

        Returns
        -------
        int
            How many tokens of running requests go through the model again.
        """

    def close(self) -> None:
        """Release all memory; the engine cannot be used afterwards."""
