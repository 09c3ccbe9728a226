"""Tasks of the real reasoning-gym package, one question an episode."""

import random
from typing import Any

import pytest
from reasoning_gym.factory import create_dataset

from envs_cpu import EnvConfigError
from envs_cpu.reasoning_gym_env import ReasoningGym

TASKS = [
    "chain_sum",
    "mini_sudoku",
    "rotate_matrix",
    "number_sorting",
    "countdown",
    "pool_matrix",
    "tower_of_hanoi",
]


def score(env: ReasoningGym, seed: int, rng: random.Random, skill: float) -> float:
    env.reset(seed)
    return env.step(env.demonstrate(rng, skill))[1]


@pytest.mark.parametrize("task", TASKS)
def test_the_item_is_reasoning_gyms_own_for_that_seed(task: str) -> None:
    env = ReasoningGym(task=task)
    item = create_dataset(task, seed=11, size=1)[0]
    assert env.reset(11) == item["question"] == ReasoningGym(task=task).reset(11)
    assert env.reset(12) != item["question"]


@pytest.mark.parametrize("task", TASKS)
def test_the_true_answer_scores_one_and_the_wrong_demonstration_less(task: str) -> None:
    env, rng = ReasoningGym(task=task), random.Random(0)
    for seed in (0, 3, 2**40 + 1):
        assert score(env, seed, rng, skill=1.0) == 1.0
        assert score(env, seed, rng, skill=0.0) < 1.0


def test_more_skill_means_more_reward() -> None:
    env, rng = ReasoningGym(task="chain_sum"), random.Random(0)
    means = [sum(score(env, seed, rng, skill) for seed in range(200)) for skill in (0.0, 0.3, 0.7, 1.0)]
    assert means == sorted(means) and len(set(means)) == 4


@pytest.mark.parametrize(
    ("said", "scores"),
    [
        ("{}", 1.0),
        (" {}\n", 1.0),
        ("<answer>{}</answer>", 1.0),
        ("first <answer>0</answer> then <answer> {} </answer> done", 1.0),
        ("<answer>wrong</answer> {}", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_answer_tag_counts_else_the_whole_text(said: str, scores: float) -> None:
    env = ReasoningGym(task="chain_sum")
    env.reset(5)
    truth = str(env.demonstrate(random.Random(0), 1.0))
    observation, reward, terminated, truncated, info = env.step(said.format(truth))
    assert (observation, reward, terminated, truncated) == ("", scores, True, False)
    assert info["expected"] == truth


def test_settings_and_instruction_reach_the_question() -> None:
    env = ReasoningGym(
        task="chain_sum",
        config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        instruction="Answer with the number only.",
    )
    question, instruction = env.reset(0).split("\n")
    assert instruction == "Answer with the number only."
    assert sum(word.isdigit() for word in question.split()) == 2


def test_items_limits_the_questions_to_a_fixed_set() -> None:
    env = ReasoningGym(task="chain_sum", items=3)
    asked = [env.reset(seed) for seed in range(6)]
    assert len(set(asked)) == 3 and asked[:3] == asked[3:]


def test_a_mixture_of_tasks_plays_as_one_task() -> None:
    specs: list[dict[str, Any]] = [
        {"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "leg_counting")
    ]
    env, rng = ReasoningGym(task="composite", config={"datasets": specs}), random.Random(0)
    assert all(score(env, seed, rng, skill=1.0) == 1.0 for seed in range(4))


def test_a_task_without_one_true_answer_says_that_it_cannot_be_demonstrated() -> None:
    env = ReasoningGym(task="graph_color")
    env.reset(0)
    with pytest.raises(EnvConfigError, match="graph_color has no single true answer"):
        env.demonstrate(random.Random(0), 1.0)
