"""Behaviour cloning of scripted players, so that a tiny policy starts with the right format and some skill.

Reinforcement learning only sharpens what a policy sometimes does already; random weights never finish a
single turn. The demonstrators are right with probability `skill` and otherwise act at random, so the
policy learns how to answer but succeeds only sometimes. That is the point: with `skill` at 1 there would
be little left for reinforcement learning to do. What it gains above the warm start is real; that the warm
start knew the rules of the game is not a result.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from envs_cpu.registry import make
from hpc_rollart.models.chat import ChatTokenizer
from hpc_rollart.models.forward import hidden_states, parameter_groups
from hpc_rollart.models.load import ModelError

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""

_SEED_BASE = 1 << 40
"""Environment seeds of demonstrations: far from a run's own."""

_CHAT_TEXT = 40
"""Characters of ordinary text that make as many tokens as the chat format adds to one turn."""

_LIKE = 1.5
"""Episodes are padded together if the longest is at most so many times as long as the shortest."""


class DemonstratedTask(Protocol):
    """What of a config's task the warm start reads."""

    @property
    def name(self) -> str: ...

    @property
    def env(self) -> str: ...

    @property
    def args(self) -> dict[str, Any]: ...

    @property
    def max_turns(self) -> int: ...


@dataclass(frozen=True)
class WarmStartSettings:
    """How a tiny policy is warm-started; the config's `model.warm_start`.

    Attributes
    ----------
    episodes
        Demonstration episodes, shared out among the tasks so that each has about as much text.
    steps, batch, learning_rate
        Supervised steps, episodes in each, and AdamW's peak rate.
    skill
        Task name to the probability that a demonstrated action is the expert's; 0.5 where not named.
    """

    episodes: int
    steps: int
    batch: int
    learning_rate: float
    skill: dict[str, float]


@dataclass(frozen=True)
class Demonstration:
    """One demonstrated episode: `observations[i]` was answered by `actions[i]`."""

    observations: list[str]
    actions: list[str]


def demonstrate(
    tasks: Sequence[DemonstratedTask], settings: WarmStartSettings, seed: int, progress: Progress
) -> list[Demonstration]:
    """Play `settings.episodes` episodes, each with an environment seed of its own.

    The next episode is always of the task with the least text so far: a game of many turns then gets fewer
    episodes than a question of one, and each task about the same share of the computation.

    Raises
    ------
    ModelError
        If a task's environment has no demonstrator.
    """
    rng = random.Random(seed)
    environments = [make(task.env, **task.args) for task in tasks]
    for task, environment in zip(tasks, environments, strict=True):
        if not hasattr(environment, "demonstrate"):
            raise ModelError(f"task {task.name}: {task.env} has no demonstrator, which a warm start needs")
    episodes = []
    text = [0] * len(tasks)
    for i in range(settings.episodes):
        which = text.index(min(text))
        task, environment = tasks[which], environments[which]
        skill = settings.skill.get(task.name, 0.5)
        observations, actions = [environment.reset(_SEED_BASE + seed * settings.episodes + i)], []
        while True:
            action = environment.demonstrate(rng, skill)  # type: ignore[attr-defined]
            actions.append(action)
            observation, _, terminated, truncated, _ = environment.step(action)
            if terminated or truncated or len(actions) == task.max_turns:
                break
            observations.append(observation)
        episodes.append(Demonstration(observations, actions))
        text[which] += sum(map(len, observations + actions)) + _CHAT_TEXT * len(actions)
        if i % 50 == 0:
            progress(i, settings.episodes, "playing demonstrations")
    for environment in environments:
        environment.close()
    return episodes


def encode(
    demonstration: Demonstration, tokenizer: PreTrainedTokenizerBase, max_context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int64) and a mask of the policy's own tokens, its end of turn included, of one episode."""
    chat = ChatTokenizer(tokenizer)
    ids: list[int] = []
    mask: list[bool] = []
    for turn, (observation, action) in enumerate(
        zip(demonstration.observations, demonstration.actions, strict=True)
    ):
        context = chat.next(observation, True) if turn else chat.first(observation)
        answer = [*tokenizer.encode(action, add_special_tokens=False), tokenizer.eos_token_id]
        ids += [*context, *answer]
        mask += [False] * len(context) + [True] * len(answer)
    return np.array(ids[:max_context], np.int64), np.array(mask[:max_context], bool)


def clone(
    model: PreTrainedModel,
    episodes: Sequence[tuple[np.ndarray, np.ndarray]],
    settings: WarmStartSettings,
    seed: int,
    progress: Progress,
) -> float:
    """Train `model` in place to give the demonstrated answers; returns the last step's loss in nats a token.

    The loss is on the policy's own tokens only; the learning rate warms up over a twentieth of the steps
    and then falls as a cosine to a tenth of its peak.
    """
    generator = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, 0.01), lr=settings.learning_rate, betas=(0.9, 0.98), fused=True
    )
    order = np.empty(0, np.int64)
    loss = math.nan
    for step in range(settings.steps):
        if order.size < settings.batch:
            order = np.concatenate([order, generator.permutation(len(episodes))])
        rows, order = order[: settings.batch], order[settings.batch :]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        optimizer.zero_grad(set_to_none=True)
        batch = [episodes[i] for i in rows]
        loss = 0.0
        for part in _of_like_length(batch):
            value = _summed_loss(model, part) / sum(int(mask.sum()) for _, mask in batch)
            value.backward()
            loss += float(value.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            progress(step, settings.steps, f"cloning demonstrations, loss {loss:.2f}")
    return loss


def _schedule(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def _of_like_length(
    batch: Sequence[tuple[np.ndarray, np.ndarray]],
) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Cut a batch by length, so that short answers are not padded to long games."""
    part: list[tuple[np.ndarray, np.ndarray]] = []
    for episode in sorted(batch, key=lambda episode: episode[0].size):
        if part and episode[0].size > _LIKE * part[0][0].size:
            yield part
            part = []
        part.append(episode)
    yield part


def _summed_loss(model: PreTrainedModel, episodes: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tensor:
    """Negative log-likelihood of the masked tokens, summed."""
    length = max(ids.size for ids, _ in episodes)
    input_ids = np.zeros((len(episodes), length), np.int64)
    wanted = np.zeros((len(episodes), length), bool)
    for row, (ids, mask) in enumerate(episodes):
        input_ids[row, : ids.size] = ids
        wanted[row, : ids.size] = mask
    where = torch.from_numpy(np.flatnonzero(wanted))
    hidden = hidden_states(model, torch.from_numpy(input_ids)).flatten(0, 1)[where - 1]
    logits = model.get_output_embeddings()(hidden)
    return nn.functional.cross_entropy(
        logits.float(), torch.from_numpy(input_ids).flatten()[where], reduction="sum"
    )
