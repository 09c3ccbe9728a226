"""Environments that fail in every way a rank must survive; used over their entry paths.

All take `turns` (episode length) and `latency_s` (fixed seconds per step and reset), and count their reward
from what was said: 1 if the text contains a digit. The failing ones fail where their name says.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


class Steady:
    """Never fails: a fixed latency, a fixed number of turns."""

    def __init__(self, turns: int = 3, latency_s: float = 0.0) -> None:
        self.turns = turns
        self.latency_s = latency_s
        self.resets = 0

    def reset(self, seed: int) -> str:
        time.sleep(self.latency_s)
        self.resets += 1
        self.turn = 0
        return f"seed {seed} reset {self.resets}"

    def step(self, text: str) -> tuple[Any, Any, Any, Any, Any]:
        time.sleep(self.latency_s)
        self.turn += 1
        reward = float(any(letter.isdigit() for letter in text))
        return f"turn {self.turn}", reward, self.turn >= self.turns, False, {"said": text}

    def close(self) -> None:
        pass


class RaisesOnThirdReset(Steady):
    """Raises on every third seed, so that about a third of all episodes fail at their reset."""

    def reset(self, seed: int) -> str:
        if seed % 3 == 0:
            raise ConnectionRefusedError("the simulator\nrefused")
        return super().reset(seed)


class FailsNow(Steady):
    """Fails at `where` ("init", "reset" or "step", the latter on turn `on_turn`) in the way `how` names."""

    def __init__(self, how: str, where: str = "step", on_turn: int = 1, **rest: Any) -> None:
        super().__init__(**rest)
        self.how, self.where, self.on_turn = how, where, on_turn
        if where == "init":
            self._fail()

    def reset(self, seed: int) -> Any:
        observation = super().reset(seed)
        return self._fail() if self.where == "reset" else observation

    def step(self, text: str) -> Any:
        result = super().step(text)
        return self._fail() if self.where == "step" and self.turn == self.on_turn else result

    def _fail(self) -> Any:
        match self.how:
            case "raise":
                raise ValueError("as asked")
            case "exit":
                sys.exit(3)
            case "os_exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(60)
            case "spin":
                while True:
                    pass
            case "hang_with_child":
                child = subprocess.Popen(["sleep", "600"])
                print(f"child {child.pid}", flush=True)
                child.wait()
        raise AssertionError(self.how)


class SleepsForEver(FailsNow):
    """Hangs in its first step."""

    def __init__(self, **rest: Any) -> None:
        super().__init__("hang", **rest)


class KillsItself(FailsNow):
    """Dies of SIGKILL in its first step."""

    def __init__(self, **rest: Any) -> None:
        super().__init__("kill", **rest)


class Flaky(Steady):
    """Each episode fails with probability `p`, decided by its seed: it raises, hangs or dies in step 1."""

    def __init__(self, p: float = 0.3, **rest: Any) -> None:
        super().__init__(**rest)
        self.p = p

    def reset(self, seed: int) -> str:
        rng = random.Random(seed)
        self.how = rng.choice(["raise", "hang", "kill"]) if rng.random() < self.p else ""
        return super().reset(seed)

    def step(self, text: str) -> Any:
        if self.how:
            FailsNow(self.how)._fail()
        return super().step(text)


class Returns(Steady):
    """Returns what `what` names from its step, or from its reset if that is "reset_*"."""

    def __init__(self, what: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.what = what

    def reset(self, seed: int) -> Any:
        return {"reset_bytes": b"seen", "reset_none": None}.get(self.what, super().reset(seed))

    def step(self, text: str) -> Any:
        values: dict[str, Any] = {
            "none": None,
            "four": ("seen", 0.0, True, False),
            "bytes": (b"seen", 0.0, True, False, {}),
            "nan": ("seen", float("nan"), True, False, {}),
            "infinite": ("seen", np.float32("inf"), True, False, {}),
            "no_number": ("seen", "1.0", True, False, {}),
            "int_flag": ("seen", 0.0, 1, False, {}),
            "no_info": ("seen", 0.0, True, False, None),
            "huge": ("x" * 2**20, 0.0, True, False, {}),
            "too_huge": ("x" * 2**27, 0.0, True, False, {}),
            "surrogate": ("half \ud800 pair", 0.0, True, False, {}),
            "numpy": (
                np.str_("seen"),
                np.float32(0.5),
                np.bool_(True),
                np.bool_(False),
                {
                    "array": np.arange(3),
                    "nan": np.float64("nan"),
                    "big": 2**70,
                    3: (1, {2}),
                    "object": object,
                    "text": "\ud800",
                },
            ),
        }
        return values[self.what]


class NotesItsClose(Steady):
    """Writes a file when it is closed."""

    def __init__(self, path: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.path = path

    def close(self) -> None:
        Path(self.path).write_text("closed")


class Noisy(Steady):
    """Prints a lot, on both streams and below Python."""

    def reset(self, seed: int) -> str:
        print("from reset")
        print("to stderr", file=sys.stderr)
        os.write(1, b"below python\n")
        subprocess.run(["echo", "from a child"], check=True, stdin=sys.stdin)
        return super().reset(seed)


class Reports(Steady):
    """Tells what it sees of the process it runs in."""

    def reset(self, seed: int) -> str:
        super().reset(seed)
        return f"{random.random()} {np.random.random()}"

    def step(self, text: str) -> Any:
        info = {
            "pid": os.getpid(),
            "environ": dict(os.environ),
            "modules": [name for name in ("torch", "mpi4py", "transformers") if name in sys.modules],
            "libraries": Path("/proc/self/maps").read_text().count("libmpi"),
            "threads": len(os.listdir("/proc/self/task")),
            "fds": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64) if _is_open(fd)),
        }
        return "seen", 0.0, True, False, info


def _is_open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
