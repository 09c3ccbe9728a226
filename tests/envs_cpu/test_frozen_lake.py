"""FrozenLake in text: Gymnasium's own rules, told so that a small policy can play."""

import random
from typing import Any

import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from envs_cpu.frozen_lake import FrozenLake


def board_of(observation: str, size: int) -> list[list[str]]:
    lines = [line.split(" ") for line in observation.splitlines()]
    return next(lines[i : i + size] for i in range(len(lines)) if all(len(c) == 1 for c in lines[i]))


def play(env: FrozenLake, seed: int, rng: random.Random, skill: float) -> float:
    env.reset(seed)
    while True:
        _, reward, terminated, truncated, _ = env.step(env.demonstrate(rng, skill))
        if terminated or truncated:
            return reward


def success(skill: float, episodes: int, **args: Any) -> float:
    env, rng = FrozenLake(**args), random.Random(1)
    return sum(play(env, seed, rng, skill) for seed in range(episodes)) / episodes


@pytest.mark.parametrize("size", [2, 4, 7])
def test_the_board_shown_is_gymnasiums_random_map_of_that_seed(size: int) -> None:
    for seed in (0, 1, 2**63):
        shown = board_of(FrozenLake(size=size).reset(seed), size)
        shown[0][0] = "S"
        expected = generate_random_map(size=size, p=0.8, seed=seed)
        assert ["".join(row).replace("O", "H").replace(".", "F") for row in shown] == expected


@pytest.mark.parametrize("is_slippery", [False, True])
def test_one_seed_gives_one_episode_and_another_seed_another_map(is_slippery: bool) -> None:
    def transcript(seed: int) -> list[Any]:
        env = FrozenLake(size=5, is_slippery=is_slippery)
        return [env.reset(seed)] + [env.step(move) for move in ("right", "down", "down", "right")]

    assert transcript(7) == transcript(7)
    assert len({FrozenLake(size=5).reset(seed) for seed in range(20)}) > 15


def test_the_first_turn_states_the_rules_and_later_turns_only_the_board() -> None:
    env = FrozenLake(p=1.0)
    assert env.reset(0).splitlines() == [
        "You are P on ice. Reach G. Avoid holes O. Answer left, down, right or up.",
        "P . . .", ". . . .", ". . . .", ". . . G",
        "left # down . right . up #",
        "G: 3 right 3 down",
    ]  # fmt: skip
    assert env.step("right")[0].splitlines() == [
        ". P . .", ". . . .", ". . . .", ". . . G",
        "left . down . right . up #",
        "G: 2 right 3 down",
    ]  # fmt: skip


def test_without_hints_only_the_board_is_shown() -> None:
    env = FrozenLake(p=1.0, hints=False)
    assert env.reset(0).endswith(". . . G")


@pytest.mark.parametrize("text", ["right", "Right.", "I go RIGHT, not left", "\n right\n"])
def test_the_first_word_that_is_a_move_is_the_move(text: str) -> None:
    env = FrozenLake(p=1.0)
    env.reset(0)
    observation, _, _, _, info = env.step(text)
    assert board_of(observation, 4)[0] == [".", "P", ".", "."]
    assert info["action"] == "right" and not info["invalid"]


@pytest.mark.parametrize("text", ["", "north", "upright", "rights", "\x00\ufffd"])
def test_an_answer_without_a_move_costs_the_turn(text: str) -> None:
    env = FrozenLake(p=1.0, max_steps=2)
    env.reset(0)
    observation, reward, terminated, truncated, info = env.step(text)
    assert board_of(observation, 4)[0][0] == "P" and info["invalid"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert env.step(text)[3], "the turn counts towards max_steps"


def test_a_hole_ends_the_episode_without_reward() -> None:
    env = FrozenLake()
    env.reset(next(s for s in range(100) if "right O" in FrozenLake().reset(s)))
    assert env.step("right")[:4] == ("You fell into a hole.", 0.0, True, False)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_an_expert_solves_every_map(size: int) -> None:
    assert success(1.0, 40, size=size, p=0.7) == 1.0


@pytest.mark.parametrize("is_slippery", [False, True])
def test_more_skill_means_more_reward(is_slippery: bool) -> None:
    rates = [success(skill, 150, is_slippery=is_slippery, max_steps=40) for skill in (0.0, 0.35, 0.7, 1.0)]
    assert rates == sorted(rates) and len(set(rates)) == 4
    assert 0.0 < rates[0] < 0.3
