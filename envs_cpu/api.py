"""What an environment is: Gymnasium's `reset` and `step`, with text in place of arrays.

An environment of one's own needs these three methods and nothing of ours:

>>> import random
>>> class GuessNumber:
...     def __init__(self, highest: int = 9) -> None:
...         self.highest = highest
...
...     def reset(self, seed: int) -> str:
...         self.number = random.Random(seed).randint(0, self.highest)
...         return f"Guess my number, 0 to {self.highest}."
...
...     def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
...         guess = int(text) if text.strip().isdigit() else -1
...         if guess == self.number:
...             return "Right.", 1.0, True, False, {}
...         hint = "higher" if guess < self.number else "lower"
...         return f"No, {hint}.", 0.0, False, False, {"guess": guess}
...
...     def close(self) -> None:
...         pass

A run uses it by its entry path, `env: mypackage.mymodule:GuessNumber` with `args: {highest: 99}`, where
`mypackage` is installed, on PYTHONPATH, or in the directory the run is started from. It may raise, hang or
die: each runs in a process of its own, and a failure costs its episode only.
"""

import random
from typing import Any, Protocol, TypeAlias, runtime_checkable

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info), as `gymnasium.Env.step` returns it."""


class EnvConfigError(ValueError):
    """An environment's name or arguments are wrong; the message names the key and the mend."""


@runtime_checkable
class TextEnv(Protocol):
    """A text environment, played in turns."""

    def reset(self, seed: int) -> str:
        """Begin an episode.

        Parameters
        ----------
        seed
            Decides everything random in the episode; the members of a group get the same one.

        Returns
        -------
        str
            The first observation: what the policy reads before its first turn.
        """
        ...

    def step(self, text: str) -> Step:
        """Act.

        Parameters
        ----------
        text
            What the policy said, whole. An answer that is no action is the environment's to deal with.

        Returns
        -------
        observation : str
            What the policy reads next.
        reward : float
            Of this turn; an episode's return is their sum.
        terminated : bool
            The task is over: reached, lost or answered.
        truncated : bool
            The episode was cut short, by a limit on turns for instance.
        info : dict
            For people and for analysis; kept as JSON, never shown to the policy.
        """
        ...

    def close(self) -> None:
        """Let go of what the environment holds."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can also show how it is played; used only to warm-start tiny policies."""

    def demonstrate(self, rng: random.Random, skill: float) -> str:
        """Next action of a demonstrator: an expert's with probability `skill`, else random but well-formed.

        Parameters
        ----------
        rng
            Source of the demonstrator's randomness; the environment's own is left alone.
        skill
            0 (random) to 1 (expert).

        Returns
        -------
        str
            Text to hand to `step`, as a policy would say it.
        """
        ...
