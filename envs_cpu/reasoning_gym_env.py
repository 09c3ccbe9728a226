"""Any reasoning-gym task as an environment of one turn: a question, an answer, a score."""

import dataclasses
import functools
import random
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from envs_cpu.api import EnvConfigError, Step
from envs_cpu.registry import nearest

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

# Some tasks seed NumPy's old generator, which takes 32 bits.
_SEEDS = 2**32
_WRONG_TRIES = 8


class Args(BaseModel):
    """Arguments of `reasoning-gym`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    """Name of the task, such as chain_sum, sudoku or countdown (`reasoning_gym.factory.DATASETS`)."""
    config: dict[str, Any] = {}
    """Settings of the task, such as {min_terms: 2, max_terms: 3}."""
    items: Annotated[int, Field(ge=1)] | None = None
    """Draw from this many fixed items; if not given, every seed is an item of its own.

    A task that reads a large corpus when it is set up (arc_agi, codeio, group_anagrams, word_ladder: 0.2 to
    0.7 s) then does it once for each worker rather than at each episode.
    """
    instruction: str = ""
    """Text put after the question, such as "Answer with the number only."."""

    def check(self) -> None:
        """Check the task's name and settings against the installed reasoning-gym."""
        from reasoning_gym.factory import DATASETS

        where = "env 'reasoning-gym'"
        if self.task not in DATASETS:
            raise EnvConfigError(
                f"{where}: args.task: unknown task {self.task!r}; {nearest(self.task, DATASETS)}"
            )
        config_class = DATASETS[self.task][1]
        valid = {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}
        for key in self.config:
            if key in ("seed", "size"):
                raise EnvConfigError(
                    f"{where}: args.config.{key}: set by the run; remove it (args.items limits the items)"
                )
            if key not in valid:
                raise EnvConfigError(
                    f"{where}: args.config.{key}: unknown setting of {self.task}; {nearest(key, valid)}"
                )
        try:
            config_class(**_settings(self.task, self.config)).validate()
        except (AssertionError, TypeError, ValueError) as error:
            raise EnvConfigError(f"{where}: args.config: {self.task} refuses it: {error}") from None


class ReasoningGym:
    """One question of a reasoning-gym task.

    The answer is what the last `<answer>` tag of the policy's text holds, else the whole text. The reward is
    the task's own `score_answer`, in [0, 1]. The item follows from the seed alone.
    """

    Args = Args

    def __init__(self, **args: Any) -> None:
        self.args = Args(**args)
        self._item: dict[str, Any] = {}

    def reset(self, seed: int) -> str:
        """Draw the seed's item and ask its question."""
        self._dataset, self._item = self._draw(seed)
        question = str(self._item["question"])
        return f"{question}\n{self.args.instruction}" if self.args.instruction else question

    def step(self, text: str) -> Step:
        """Score the answer; the episode is over."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text)
        if answer is None:
            answer = text.strip()
        score = float(self._dataset.score_answer(answer=answer, entry=self._item))
        info = {"answer": answer, "expected": self._item["answer"], "task": self.args.task}
        return "", score, True, False, info

    def close(self) -> None:
        """Nothing is held."""

    def demonstrate(self, rng: random.Random, skill: float) -> str:
        """The true answer with probability `skill`, else a wrong one of the same form.

        Raises
        ------
        EnvConfigError
            The task has no single true answer to show.
        """
        truth = self._item["answer"]
        if not isinstance(truth, str):
            raise EnvConfigError(
                f"env 'reasoning-gym': {self.args.task} has no single true answer to demonstrate; "
                "leave it out of the warm start"
            )
        return truth if rng.random() < skill else self._wrong(rng, truth)

    def _draw(self, seed: int) -> tuple["ProceduralDataset", dict[str, Any]]:
        args = self.args
        if args.items is not None:
            dataset = self._fixed
            return dataset, dataset[seed % args.items]
        dataset = _dataset(args.task, args.config, seed=seed % _SEEDS, size=1)
        return dataset, dataset[0]

    @functools.cached_property
    def _fixed(self) -> "ProceduralDataset":
        assert self.args.items is not None
        return _dataset(self.args.task, self.args.config, seed=0, size=self.args.items)

    def _wrong(self, rng: random.Random, truth: str) -> str:
        """A number with one digit changed; of any other answer, that of another item."""
        for _ in range(_WRONG_TRIES):
            if truth.lstrip("-").isdigit():
                place = rng.choice([i for i, letter in enumerate(truth) if letter != "-"])
                wrong = truth[:place] + rng.choice("0123456789") + truth[place + 1 :]
            else:
                wrong = str(self._draw(rng.randrange(_SEEDS))[1]["answer"])
            if self._dataset.score_answer(answer=wrong, entry=self._item) < 1.0:
                return wrong
        # Every item has this answer, or all of them solve this one.
        return truth[::-1] + "?"


def _dataset(task: str, config: dict[str, Any], seed: int, size: int) -> "ProceduralDataset":
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, seed=seed, size=size, **_settings(task, config))


def _settings(task: str, config: dict[str, Any]) -> dict[str, Any]:
    """The task's settings as it takes them: `composite`, a mixture of tasks, wants objects of its own."""
    if task != "composite":
        return config
    from reasoning_gym.composite import DatasetSpec

    return config | {"datasets": [DatasetSpec(**spec) for spec in config.get("datasets", [])]}
