"""One episode: the environment and the policy take turns until one of them ends it.

Every trajectory runs in a coroutine of its own (paper section 4: trajectory-level rollout), so a slow
environment or a long answer holds up nothing but itself.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hpc_rollart.messages import Generate, Generated, Sampling, Ticket


class Environment(Protocol):
    """What an episode asks of its environment, wherever that runs."""

    async def reset(self, seed: int, timeout_s: float) -> str:
        """Begin an episode; returns the first observation."""
        ...

    async def step(self, text: str, timeout_s: float) -> "Outcome":
        """Act with what the policy said."""
        ...


class Outcome(Protocol):
    """What one `step` returned."""

    @property
    def observation(self) -> str: ...

    @property
    def reward(self) -> float: ...

    @property
    def terminated(self) -> bool: ...

    @property
    def truncated(self) -> bool: ...

    @property
    def info(self) -> dict[str, Any]: ...


class Chat(Protocol):
    """How turns become tokens; sampled tokens are never re-tokenised."""

    def first(self, observation: str) -> list[int]:
        """Tokens of the conversation's beginning, up to where the policy speaks."""
        ...

    def next(self, observation: str, ended_with_eos: bool) -> list[int]:
        """Tokens between one sampled turn and the next."""
        ...

    def can_fit(self, observation: str, max_context: int) -> bool:
        """Whether so long a text may fit, known without making tokens of it."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of sampled tokens."""
        ...


@dataclass(frozen=True)
class EpisodeRules:
    """What the configuration says of one task's episodes (`tasks` in the run's YAML)."""

    max_turns: int
    max_context: int
    reset_s: float
    step_s: float
    sampling: Sampling


@dataclass
class Turn:
    """One exchange: `context_count` tokens given, `sampled_count` sampled, seconds spent on each side."""

    context_count: int
    sampled_count: int = 0
    reward: float = 0.0
    t_generate: float = 0.0
    t_step: float = 0.0


@dataclass
class Episode:
    """A trajectory as it grows; whatever ends it, what is here is what happened.

    Attributes
    ----------
    tokens, logprobs, versions, sampled
        The columns of `/tokens`: all tokens in order, context and sampled; log-prob NaN and version -1
        where a token was not sampled.
    messages
        The conversation as text, for people; training never reads it.
    """

    ticket: Ticket
    t_started: float = 0.0
    t_finished: float = 0.0
    t_scored: float = 0.0
    stop: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    def add_context(self, ids: list[int]) -> None:
        """Append tokens that the policy is given, and open the turn they belong to."""
        self.tokens += ids
        self.logprobs += [float("nan")] * len(ids)
        self.versions += [-1] * len(ids)
        self.sampled += [0] * len(ids)
        self.turns.append(Turn(context_count=len(ids)))

    def add_sampled(self, generated: Generated) -> list[int]:
        """Append what the policy sampled, exactly as the engine reported it (invariant 5)."""
        ids: list[int] = generated.tokens.tolist()
        self.tokens += ids
        self.logprobs += generated.logprobs.tolist()
        self.versions += generated.versions.tolist()
        self.sampled += [1] * len(ids)
        self.turns[-1].sampled_count = len(ids)
        self.turns[-1].t_generate = generated.seconds
        return ids

    @property
    def start_version(self) -> int:
        """Weight version that sampled the first token; -1 if none was sampled."""
        return next((v for v in self.versions if v >= 0), -1)

    @property
    def end_version(self) -> int:
        """Weight version that sampled the last token; -1 if none was sampled."""
        return next((v for v in reversed(self.versions) if v >= 0), -1)

    @property
    def rewards(self) -> list[float]:
        """The environment's reward of every turn."""
        return [turn.reward for turn in self.turns]


async def play(
    episode: Episode,
    rules: EpisodeRules,
    environment: Environment,
    chat: Chat,
    generate: Callable[[Generate], Awaitable[Generated]],
    eos_ids: frozenset[int],
) -> None:
    """Play `episode` to its end, filling it in as it goes.

    A failure of the environment is raised as it is; the episode then holds what happened before it.

    Raises
    ------
    EnvFailure
        The environment raised, hung, died or returned something that is not an observation.
    """
    ticket = episode.ticket
    observation = await environment.reset(ticket.env_seed, rules.reset_s)
    context = chat.first(observation) if chat.can_fit(observation, rules.max_context) else None
    for turn in range(rules.max_turns):
        if context is None or len(episode.tokens) + len(context) >= rules.max_context:
            episode.stop = "max_context"
            return
        episode.messages.append({"role": "user", "content": observation})
        episode.add_context(context)
        generated = await generate(
            Generate(
                trajectory=ticket.trajectory,
                turn=turn,
                tokens=np.asarray(episode.tokens, dtype=np.int32),
                sampling=rules.sampling,
                seed=ticket.sample_seed,
            )
        )
        ids = episode.add_sampled(generated)
        ended_with_eos = bool(ids) and ids[-1] in eos_ids
        text = chat.decode(ids[:-1] if ended_with_eos else ids)
        episode.messages.append({"role": "assistant", "content": text})
        began = time.monotonic()
        outcome = await environment.step(text, rules.step_s)
        episode.turns[-1].t_step = time.monotonic() - began
        episode.turns[-1].reward = outcome.reward
        if outcome.info:
            episode.info = outcome.info
        if outcome.terminated or outcome.truncated:
            episode.stop = "terminated" if outcome.terminated else "truncated"
            episode.messages.append({"role": "user", "content": outcome.observation})
            return
        if generated.stop == "max_context":
            episode.stop = "max_context"
            return
        observation = outcome.observation
        fits = chat.can_fit(observation, rules.max_context)
        context = chat.next(observation, ended_with_eos) if fits else None
    episode.stop = "max_turns"
