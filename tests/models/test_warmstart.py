"""Behaviour cloning of scripted players."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rollart.models.load import ModelError
from hpc_rollart.models.tiny import build_model, build_tokenizer
from hpc_rollart.models.warmstart import (
    Demonstration,
    WarmStartSettings,
    clone,
    demonstrate,
    encode,
)


@dataclass
class FakeTask:
    name: str
    env: str
    args: dict[str, Any] = field(default_factory=dict)
    max_turns: int = 8


LAKE = FakeTask("lake", "frozen-lake", {"size": 3, "max_steps": 8})
SUMS = FakeTask(
    "sums", "reasoning-gym", {"task": "basic_arithmetic", "config": {"max_terms": 2, "max_digits": 1}}, 1
)


def settings(episodes: int, steps: int = 1, **skill: float) -> WarmStartSettings:
    return WarmStartSettings(episodes=episodes, steps=steps, batch=8, learning_rate=3e-3, skill=skill)


def quiet(*_: object) -> None:
    pass


def test_a_skilled_demonstrator_wins_more_often() -> None:
    def wins(skill: float) -> int:
        episodes = demonstrate([LAKE], settings(40, lake=skill), 0, quiet)
        # An expert needs four moves to six; the unlucky use up all eight or fall sooner.
        return sum(len(e.actions) in (4, 6) for e in episodes)

    assert wins(1.0) == 40
    assert wins(0.0) < 30


def test_tasks_share_the_text_not_the_episodes() -> None:
    episodes = demonstrate([LAKE, SUMS], settings(120), 0, quiet)
    sums = sum(e.observations[0].startswith("Calculate") for e in episodes)
    assert len(episodes) == 120
    assert 100 < sums < 117


def test_demonstrations_follow_from_the_seed() -> None:
    assert demonstrate([SUMS], settings(5), 7, quiet) == demonstrate([SUMS], settings(5), 7, quiet)
    assert demonstrate([SUMS], settings(5), 7, quiet) != demonstrate([SUMS], settings(5), 8, quiet)


def test_an_environment_without_a_demonstrator_is_named() -> None:
    with pytest.raises(ModelError, match=r"task mine: .*Mute has no demonstrator"):
        demonstrate([FakeTask("mine", "tests.models.test_warmstart:Mute")], settings(1), 0, quiet)


class Mute:
    def reset(self, seed: int) -> str:
        return ""

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}

    def close(self) -> None:
        pass


def test_only_the_policys_own_tokens_and_its_end_of_turn_are_learnt() -> None:
    tokenizer = build_tokenizer(["go left right stay"] * 3)
    ids, mask = encode(Demonstration(["go", "stay"], ["left", "right"]), tokenizer, 100)
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\nleft<|im_end|>"
        "\n<|im_start|>user\nstay<|im_end|>\n<|im_start|>assistant\nright<|im_end|>"
    )
    assert tokenizer.decode(ids[mask]) == "left<|im_end|>right<|im_end|>"
    short, short_mask = encode(Demonstration(["go"], ["left"]), tokenizer, 3)
    assert len(short) == len(short_mask) == 3


def test_cloning_lowers_the_loss_from_a_uniform_guess_to_what_was_shown() -> None:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(["a b c d yes no"] * 3)
    shown = [Demonstration([q], [a]) for q, a in (("a", "yes"), ("b", "no"), ("c", "no"), ("d", "yes"))]
    episodes = [encode(d, tokenizer, 64) for d in shown]
    model = build_model(tokenizer, 64, 0)
    seen: list[tuple[int, int, str]] = []
    loss = clone(model, episodes, settings(4, steps=60), 0, lambda *p: seen.append(p))
    assert loss < 0.1 < math.log(len(tokenizer))
    assert seen[0][:2] == (0, 60)
    for ids, mask in episodes:
        with torch.no_grad():
            likeliest = model(input_ids=torch.from_numpy(ids)[None]).logits[0].argmax(-1).numpy()
        where = np.flatnonzero(mask)
        assert (likeliest[where - 1] == ids[where]).all()
