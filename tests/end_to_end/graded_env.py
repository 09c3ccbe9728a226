"""An environment in which the seed and what was said decide all that follows, and most words differ."""

import time
from typing import Any
from zlib import crc32


class Graded:
    """Grades each answer by its checksum, so that rewards of a group differ and every step learns."""

    def __init__(self, turns: int = 2, latency_s: float = 0.0) -> None:
        self.turns = turns
        self.latency_s = latency_s

    def reset(self, seed: int) -> str:
        time.sleep(self.latency_s)
        self.turn = 0
        return f"seed {seed}"

    def step(self, text: str) -> tuple[Any, Any, Any, Any, Any]:
        time.sleep(self.latency_s)
        self.turn += 1
        reward = crc32(text.encode()) % 101 / 100
        return f"turn {self.turn} after {text}", reward, self.turn >= self.turns, False, {}

    def close(self) -> None:
        pass
