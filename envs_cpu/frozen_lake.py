"""Gymnasium's FrozenLake as a game of many short text turns, on a new solvable map for every seed.

The board is one symbol a cell with a space between cells, so that a tokeniser cannot merge cells, and the
turn ends in what lies next to the player, so that even a very small policy can act on it.
"""

import random
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from envs_cpu.api import Step

if TYPE_CHECKING:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

# Gymnasium's action numbers.
ACTIONS = ("left", "down", "right", "up")
_ACTION = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)
_OFFSETS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_SYMBOLS = {"S": ".", "F": ".", "H": "O", "G": "G"}
_RULES = "You are P on ice. Reach G. Avoid holes O. Answer left, down, right or up."
_DISCOUNT = 0.99


class Args(BaseModel):
    """Arguments of `frozen-lake`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Annotated[int, Field(ge=2, le=32)] = 4
    """Cells on a side."""
    p: Annotated[float, Field(ge=0.6, le=1.0)] = 0.8
    """Probability that a cell is ice rather than a hole; below 0.6 large maps are hardly ever solvable."""
    is_slippery: bool = False
    """Whether a move may go sideways instead (Gymnasium's default is yes)."""
    success_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1 / 3
    """On slippery ice: probability that a move goes where it was meant to."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Turns after which the episode is truncated; 4 * size if not given."""
    hints: bool = True
    """Whether each turn names what lies left, down, right and up of the player, and where the goal is."""


class FrozenLake:
    """The player P walks over ice `.` to G and must not fall into a hole O.

    An answer's first word out of left, down, right and up is the move. An answer without one costs the turn:
    nobody moves, and `info["invalid"]` is true. Reward 1 at the goal and 0 otherwise, as Gymnasium has it.
    The map and the slips follow from the seed alone.
    """

    Args = Args

    def __init__(self, **args: Any) -> None:
        self.args = Args(**args)
        self.max_steps = self.args.max_steps or 4 * self.args.size
        self._steps = 0
        self._best: list[int] | None = None

    def reset(self, seed: int) -> str:
        """Draw the seed's map and describe it."""
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

        args = self.args
        self._map = generate_random_map(size=args.size, p=args.p, seed=seed)
        self._lake: FrozenLakeEnv = FrozenLakeEnv(
            desc=self._map,
            is_slippery=args.is_slippery,
            success_rate=args.success_rate,
        )
        self._lake.reset(seed=seed)
        self._steps = 0
        self._best = None
        return f"{_RULES}\n{self._board()}"

    def step(self, text: str) -> Step:
        """Move, if `text` names a move."""
        self._steps += 1
        match = _ACTION.search(text)
        reward, terminated = 0.0, False
        if match:
            action = ACTIONS.index(match[1].lower())
            _, reward, terminated, _, _ = self._lake.step(action)
        truncated = not terminated and self._steps >= self.max_steps
        info = {"steps": self._steps, "invalid": match is None, "action": match[1].lower() if match else None}
        if terminated:
            observation = "You reached G." if reward else "You fell into a hole."
        else:
            observation = self._board() if match else f"Answer left, down, right or up.\n{self._board()}"
        return observation, float(reward), terminated, truncated, info

    def close(self) -> None:
        """Nothing is held."""

    def demonstrate(self, rng: random.Random, skill: float) -> str:
        """The best move with probability `skill`, else any of the four."""
        if rng.random() >= skill:
            return rng.choice(ACTIONS)
        if self._best is None:
            self._best = _best_moves(self._lake)
        return ACTIONS[self._best[int(self._lake.s)]]

    def _board(self) -> str:
        size = self.args.size
        row, col = divmod(int(self._lake.s), size)
        cells = [[_SYMBOLS[cell] for cell in line] for line in self._map]

        def around(move: str) -> str:
            r, c = row + _OFFSETS[move][0], col + _OFFSETS[move][1]
            return cells[r][c] if 0 <= r < size and 0 <= c < size else "#"

        beside = " ".join(f"{move} {around(move)}" for move in ACTIONS)
        cells[row][col] = "P"
        board = "\n".join(" ".join(line) for line in cells)
        if not self.args.hints:
            return board
        # The goal is the last cell, so it is never to the left or above.
        return f"{board}\n{beside}\nG: {size - 1 - col} right {size - 1 - row} down"


def _best_moves(lake: "FrozenLakeEnv") -> list[int]:
    """Best move in each state by value iteration on Gymnasium's own transition table.

    Discounting makes the shortest way the best one where the ice is not slippery.
    """
    states = range(len(lake.P))
    value = [0.0] * len(lake.P)

    def worth(state: int, action: int) -> float:
        return sum(
            p * (reward + (0.0 if end else _DISCOUNT * value[following]))
            for p, following, reward, end in lake.P[state][action]
        )

    change = 1.0
    while change > 1e-6:
        change = 0.0
        for state in reversed(states):
            new = max(worth(state, action) for action in range(4))
            change = max(change, abs(new - value[state]))
            value[state] = new
    return [max(range(4), key=lambda action: worth(state, action)) for state in states]
