"""What the tests of a run's life in Slurm share: a small run, submitting it, and waiting for things."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

if TYPE_CHECKING:
    from tests.slurm.conftest import Testbed

ROOT = Path(__file__).parents[2]
ROLLART = (sys.executable, "-m", "hpc_rollart")


def small_config(model: str) -> dict[str, Any]:
    """A run whose steps take a fraction of a second and whose rewards differ, so that losses tell runs apart.

    Exactly synchronous and deterministic: whatever happens to it, each step must come out the same.
    """
    return {
        "run": {"name": "small", "seed": 3, "steps": 60},
        "model": {"path": model, "max_context": 256},
        "algorithm": {"type": "grpo", "group_size": 4, "groups_per_batch": 4, "learning_rate": 1e-4},
        "schedule": {"mode": "sync"},
        "engine": {"deterministic": True},
        "tasks": [
            {
                "name": "arithmetic",
                "env": "reasoning-gym",
                "args": {
                    "task": "basic_arithmetic",
                    "config": {
                        "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1,
                        "operators": ["+"], "allow_parentheses": False, "allow_negation": False,
                    },
                },
                "max_turns": 1,
                "sampling": {"max_tokens": 8},
            }
        ],
        "components": {
            "trainer": {"role": "trainer", "gpus_per_rank": 1},
            "generate": {"role": "generator", "nodes": 2, "gpus_per_rank": 1},
            "env": {"role": "env", "ranks_per_node": 2, "slots": 16},
        },
        "checkpoint": {"every_steps": 5},
        "launch": {"stop_lead_s": 60, "restart": {"backoff_s": 1}},
    }  # fmt: skip


@dataclass
class Job:
    """A submitted run."""

    testbed: Testbed
    run: Path
    id: str

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl so far."""
        try:
            text = (self.run / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def status(self) -> dict[str, Any]:
        """status.json, or nothing yet."""
        try:
            return json.loads((self.run / "status.json").read_text())
        except FileNotFoundError:
            return {}

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """What the supervisor put on record, or the events of one name."""
        path = self.run / "slurm" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if name in ("", event["event"])]

    def log(self) -> str:
        """The batch log."""
        path = self.run / "slurm" / f"{self.id}_0_log.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float = 240) -> None:
        """Wait until `condition` is true; fail with the batch log if the run fails or it takes too long."""
        end = time.monotonic() + deadline_s
        while not condition():
            failed = self.events("failed")
            assert not failed and time.monotonic() < end, f"{what}: {self.status()}\n{self.log()}"
            time.sleep(0.2)

    def wait_steps(self, count: int, attempt: int = 0) -> None:
        """Wait until `count` steps are done, the last of them in attempt `attempt` or later."""
        self.wait(
            lambda: len(lines := self.metrics()) >= count and lines[-1]["attempt"] >= attempt,
            f"{count} steps in attempt {attempt}",
        )

    def wait_failed(self) -> str:
        """Wait until the run has failed, and return why."""
        end = time.monotonic() + 240
        while not self.events("failed"):
            assert time.monotonic() < end, f"the run does not fail: {self.status()}\n{self.log()}"
            time.sleep(0.2)
        self.wait_gone()
        return str(self.events("failed")[0]["message"])

    def wait_gone(self) -> None:
        """Wait until Slurm has let go of the job."""
        end = time.monotonic() + 60
        while self.testbed.run("squeue", "-h", "-j", self.id).stdout:
            assert time.monotonic() < end, f"job {self.id} does not end\n{self.log()}"
            time.sleep(0.5)

    def finish(self, deadline_s: float = 300) -> None:
        """Wait until the run is done and its job gone."""
        self.wait(lambda: self.status().get("state") == "done", "the run's end", deadline_s)
        self.wait_gone()


def submit(testbed: Testbed, conf: Path, run: Path, *options: str) -> Job:
    """Submit a config to the testbed as a user does."""
    # shared: testbeds and checkouts below /tmp are shown to the nodes, which the program cannot know.
    where = ("--cluster", "testbed", "--dir", str(run), "--shared")
    done = testbed.run(*ROLLART, "submit", str(conf), *where, *options, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads((run / "slurm" / "jobs.jsonl").read_text().splitlines()[-1])
    return Job(testbed, run, str(line["job"]))


def write(config: dict[str, Any], path: Path) -> Path:
    """Write a config."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def folder(testbed: Testbed, name: str) -> Path:
    """A new folder that every node sees."""
    path = testbed.shared / f"tests-{os.getpid()}" / name
    path.mkdir(parents=True)
    return path


class Deadly:
    """An environment that kills the rank that runs it."""

    def reset(self, seed: int) -> str:
        """Kill the env rank, the youngest ancestor of this worker that is a rank."""
        for parent in psutil.Process().parents():
            if "hpc_rollart.launch.rank" in parent.cmdline():
                parent.kill()
                break
        return "gone"

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Never reached."""
        return "", 0.0, True, False, {}

    def close(self) -> None:
        """Nothing is held."""
