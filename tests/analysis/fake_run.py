"""Makes a run directory through the real writers, without running anything.

A small world on a simulated clock: one trainer, two generators of different pools, a coordinator and two
env ranks; two tasks that are learnt, at different speeds, with failures, stale and surplus work.
`plant` breaks one thing, for the audit to find. To look at one: ``python -m tests.analysis.fake_run DIR``.
"""

import json
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hpc_rollart.observe.metrics import MetricsWriter
from hpc_rollart.observe.status import StatusFile
from hpc_rollart.observe.timeline import Coalescer, Timeline
from hpc_rollart.store.batches import BatchWriter
from hpc_rollart.store.schema import first_trajectory
from hpc_rollart.store.writer import ShardWriter, TrajectoryRecord, TurnRecord

TASKS = ["frozen-lake", "chain-sum"]
POOLS = ["compute", "bandwidth"]
GROUP_SIZE = 4
GROUPS = 4
START = 1.8e9
STEP_S = 2.0
CONFIG: dict[str, Any] = {
    "run": {"name": "fake", "dir": "runs/fake", "seed": 0, "steps": 60, "time_budget": None},
    "model": {"builtin": "tiny", "dtype": "float32", "max_context": 512},
    "algorithm": {
        "type": "grpo",
        "group_size": GROUP_SIZE,
        "groups_per_batch": GROUPS,
        "learning_rate": 3e-4,
    },
    "schedule": {"mode": "async", "alpha": 1},
    "tasks": [
        {"name": "frozen-lake", "env": "frozen_lake", "max_turns": 8},
        {"name": "chain-sum", "env": "reasoning_gym", "max_turns": 1},
    ],
    "components": {
        "trainer": {"role": "trainer", "ranks_per_node": 1},
        "generate-compute": {"role": "generator", "pool": "compute", "ranks_per_node": 1},
        "generate-bandwidth": {"role": "generator", "pool": "bandwidth", "ranks_per_node": 1},
        "env": {"role": "env", "ranks_per_node": 3, "slots": 16},
    },
}
FAILURES = [
    ("env_failed", "step_timeout", "step took longer than 5 s"),
    ("env_failed", "worker_died", "worker ended with signal 9"),
    ("reward_failed", "score_error", "ZeroDivisionError: division by zero"),
]


@dataclass
class World:
    """The state of the simulated run."""

    rng: random.Random
    writers: list[ShardWriter]
    counts: Counter[str] = field(default_factory=Counter)
    trajectories: int = 0
    groups: int = 0
    attempt: int = 0
    texts: dict[str, str] = field(default_factory=dict)

    def play(
        self, task: int, group: int, version: int, now: float, skill: float, status: str
    ) -> TrajectoryRecord:
        rng = self.rng
        trajectory, self.trajectories = self.trajectories, self.trajectories + 1
        stop, info = "terminated", {}
        solved = rng.random() < skill
        reward = float(solved) if task == 0 else (1.0 if solved else rng.choice([0.0, 0.1]))
        if status in ("env_failed", "reward_failed"):
            status, stop, reason = rng.choice([failure for failure in FAILURES if failure[0] == status])
            reward, info = math.nan, {"reason": reason}
        elif status in ("stale", "surplus"):
            stop, reward = "cancelled", math.nan
        turns = rng.randint(2, 7) if task == 0 else 1
        messages, records, sampled = [], [], []
        for turn in range(turns):
            last = turn == turns - 1
            if task == 0:
                grid = ["SFFF", "FHFH", "FFFH", "HFFG"]
                here = rng.randrange(4)
                grid[here] = grid[here][: turn % 4] + "@" + grid[here][turn % 4 + 1 :]
                question, answer = "\n".join(grid), rng.choice(["right", "down", "I go down.", "left"])
            else:
                a, b = rng.randint(10, 99), rng.randint(10, 99)
                question = f"State the final answer to the following arithmetic problem: {a} + {b} ="
                answer = f"{a + b if solved else a + b + rng.choice([-10, 1, 10])}"
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            context, count = rng.randint(12, 24), rng.randint(2, 10)
            gained = reward if last and math.isfinite(reward) else 0.0
            records.append(
                TurnRecord(context, count, gained, rng.uniform(0.02, 0.1), rng.uniform(1e-4, 4e-3))
            )
            sampled += [0] * context + [1] * count
        if task == 0:
            messages.append(
                {"role": "user", "content": "You reached the goal." if solved else "You fell in."}
            )
        flags = np.array(sampled, np.uint8)
        spill = np.cumsum(flags) > 0.8 * flags.sum() if rng.random() < 0.3 else np.zeros(len(flags), bool)
        versions = np.where(flags, version + spill, -1).astype(np.int32)
        seconds = sum(turn.t_generate + turn.t_step for turn in records)
        self.counts[status] += 1
        self.counts["started"] += 1
        for message in messages:
            message["content"] = self.texts.get(message["role"], message["content"])
        return TrajectoryRecord(
            trajectory=trajectory,
            group=group,
            task=task,
            status=status,
            stop=stop,
            seed=group,
            start_version=version,
            end_version=int(versions.max()),
            reward=reward,
            pool=task,
            generator=1 + task,
            t_admitted=now,
            t_started=now + 0.01,
            t_finished=now + 0.01 + seconds,
            t_scored=now + 0.02 + seconds,
            tokens=np.array([rng.randrange(256) for _ in sampled], np.int32),
            logprobs=np.where(flags, -np.random.default_rng(trajectory).random(len(flags)), np.nan).astype(
                np.float32
            ),
            versions=versions,
            sampled=flags,
            turns=records,
            messages=messages,
            info=info,
        )


def make_run(
    path: Path,
    steps: int = 60,
    *,
    state: str = "done",
    plant: str = "",
    texts: dict[str, str] | None = None,
    failure: dict[str, Any] | None = None,
    resumed_at: int | None = None,
) -> Path:
    """Write a run of `steps` steps.

    Parameters
    ----------
    state
        What ``status.json`` says became of it.
    plant
        One fault: ``stale``, ``double``, ``missing_row``, ``two_rows``, ``reward``, ``consumed_failure``,
        ``torn_group``, ``untrue_version``, ``staleness_logged``.
    texts
        Replaces what every message of a role says.
    failure
        Content of ``logs/0/failure.json``.
    resumed_at
        Step at which a second attempt begins; the first one was killed two steps later.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    world = World(random.Random(0), _writers(path, 0), texts=texts or {})
    first = 0
    if resumed_at is not None:
        with BatchWriter(path / "batches", run_id="fake", attempt=0) as log, MetricsWriter(path) as metrics:
            for step in range(resumed_at + 2):
                _one_step(world, step, steps, log, metrics, plant)
        for writer in world.writers:
            writer.close()
        for number, step in enumerate((0, resumed_at)):
            (path / "logs" / str(number)).mkdir(parents=True)
            (path / "logs" / str(number) / "attempt.json").write_text(
                json.dumps({"number": number, "step": step, "checkpoint": None, "nodes": {}})
            )
        world.attempt, first = 1, resumed_at
        world.trajectories, world.groups = first_trajectory(1), GROUPS * resumed_at
        world.writers = _writers(path, 1)
    writers, attempt = world.writers, world.attempt
    with (
        BatchWriter(path / "batches", run_id="fake", attempt=attempt) as log,
        MetricsWriter(path, first) as metrics,
    ):
        for step in range(first, steps):
            _one_step(world, step, steps, log, metrics, plant)
    if plant == "two_rows":
        record = world.play(0, 0, 0, START, 0.5, "surplus")
        record.trajectory = 3
        writers[0].append(record) if 3 not in writers[0]._where else writers[1].append(record)
    for writer in writers:
        writer.close()
    _timelines(path, steps)
    end = START + steps * STEP_S
    StatusFile(path).write(
        {"state": state, "step": steps, "steps": 60, "t": end, "t_start": START, "message": ""}
    )
    if failure:
        (path / "logs" / "0").mkdir(parents=True)
        (path / "logs" / "0" / "failure.json").write_text(json.dumps(failure))
    return path


def _writers(path: Path, attempt: int) -> list[ShardWriter]:
    return [
        ShardWriter(
            path / "trajectories",
            component="env",
            rank=rank,
            run_id="fake",
            host="node-1",
            attempt=attempt,
            tasks=TASKS,
            pools=POOLS,
        )
        for rank in (4, 5)
    ]


def _one_step(
    world: World, step: int, steps: int, log: BatchWriter, metrics: MetricsWriter, plant: str
) -> None:
    rng, now, version = world.rng, START + (step + 1) * STEP_S, step
    planted = step == max(1, steps // 2 - 1)
    batch: list[TrajectoryRecord] = []
    for place in range(GROUPS):
        task = place % 2
        group, world.groups = world.groups, world.groups + 1
        skill = (0.1 + 0.8 * step / 60) if task == 0 else 0.25 + 0.5 / (1 + math.exp((25 - step) / 5))
        start = max(0, version - (rng.random() < 0.5))
        statuses = ["ok"] * GROUP_SIZE
        if rng.random() < 0.15:
            statuses.append(rng.choice(["env_failed", "reward_failed", "stale", "surplus"]))
        for status in statuses:
            record = world.play(task, group, start, now - STEP_S * rng.uniform(0.5, 1.5), skill, status)
            if planted and place == 0 and plant == "untrue_version" and record.status == "ok":
                record.versions = np.where(record.sampled, record.versions + 1, -1).astype(np.int32)
            lost = planted and plant == "missing_row" and len(batch) == 5 and status == "ok"
            if not lost:
                rng.choice(world.writers).append(record)
            if status == "ok":
                batch.append(record)
    consumed = list(batch)
    lag = [version - record.start_version for record in consumed]
    trained_from = version
    groups = [record.group for record in consumed]
    if planted and plant == "stale":
        trained_from = version + 2
        lag = [trained_from - record.start_version for record in consumed]
    if planted and plant == "double":
        consumed[-1] = consumed[-2]
        lag[-1] = lag[-2]
    if planted and plant == "staleness_logged":
        lag[0] += 1
    if planted and plant == "consumed_failure":
        writer = next(writer for writer in world.writers if consumed[0].trajectory in writer._where)
        writer.set_status(consumed[0].trajectory, "env_failed")
    if planted and plant == "torn_group":
        consumed, lag, groups = consumed[:-1], lag[:-1], groups[:-1]
    rewards = np.array([record.reward for record in consumed])
    advantages = _advantages(rewards, groups)
    log.append(step, trained_from, [r.trajectory for r in consumed], groups, lag, advantages)
    for writer in world.writers:
        writer.flush()
    by_task = {
        name: float(np.mean([record.reward for record in consumed if record.task == task]))
        for task, name in enumerate(TASKS)
    }
    if planted and plant == "reward":
        by_task["frozen-lake"] += 0.125
    sampled = sum(int(record.sampled.sum()) for record in consumed)
    progress = (step + 1) / 60
    metrics.write(
        {
            "step": step,
            "attempt": world.attempt,
            "version": trained_from,
            "t": now,
            "reward": by_task,
            "reward_mean": float(rewards.mean()),
            "loss": 0.02 * rng.gauss(0, 1),
            "grad_norm": 0.3 + 0.2 * rng.random() + 0.4 * math.exp(-step / 10),
            "entropy": 1.6 * math.exp(-1.2 * progress) + rng.gauss(0, 0.03),
            "clip_fraction": abs(rng.gauss(0.02, 0.01)),
            "correction_mean": 1 + rng.gauss(0, 0.01),
            "correction_capped": abs(rng.gauss(0, 0.002)),
            "kl_behaviour": abs(rng.gauss(0.004, 0.002)),
            "staleness_mean": float(np.mean(lag)),
            "staleness_max": max(lag),
            "staleness_hist": {str(value): count for value, count in sorted(Counter(lag).items())},
            "trajectories": len(consumed),
            "tokens": sampled,
            "sampled_tokens": sampled,
            "tokens_per_s": 900 + 80 * rng.gauss(0, 1),
            "wait_batch_s": abs(rng.gauss(0.2, 0.08)),
            "train_s": abs(rng.gauss(1.3, 0.1)),
            "publish_s": abs(rng.gauss(0.4, 0.05)),
            "exposed_s": abs(rng.gauss(0.02, 0.005)),
            "turns_mean": {"frozen-lake": 4.5 - 2 * progress, "chain-sum": 1.0},
            "counts": dict(world.counts),
            "zero_advantage_groups": rng.randrange(3),
            "learning_rate": 3e-4,
        }
    )


def _advantages(rewards: np.ndarray, groups: list[int]) -> list[float]:
    means = {group: rewards[[g == group for g in groups]].mean() for group in groups}
    return [float(reward - means[group]) for reward, group in zip(rewards, groups, strict=True)]


def _timelines(path: Path, steps: int) -> None:
    rng = random.Random(1)
    directory = path / "timeline"
    with Timeline(directory, "trainer", 0) as line:
        for step in range(1, steps + 1):
            now = START + step * STEP_S
            wait = rng.uniform(0.1, 0.4)
            line.event("wait batch", "wait", now, wait, step=step)
            line.event("train", "train", now + wait, 1.3, step=step)
            line.event("snapshot", "weights", now + wait + 1.3, 0.06, version=step)
            line.event("broadcast", "weights", now + wait + 1.36, 0.4, version=step)
    for rank, component in ((1, "generate-compute"), (2, "generate-bandwidth")):
        with Timeline(directory, component, rank) as line:
            busy = Coalescer(line)
            now = START + 0.3
            installs = [START + step * STEP_S + 1.9 for step in range(1, steps + 1)]
            while now < START + (steps + 1) * STEP_S:
                if installs and now >= installs[0]:
                    busy.flush()
                    line.event("stage", "weights", now - 0.4, 0.4)
                    line.event("install", "weights", now, 0.02)
                    line.event("recompute", "weights", now + 0.02, 0.01)
                    now += 0.03
                    installs.pop(0)
                if rng.random() < 0.01 * rank:
                    busy.flush()
                    idle = rng.uniform(0.05, 0.3)
                    line.event("idle", "wait", now, idle)
                    now += idle
                length = rng.uniform(0.01, 0.02)
                busy.busy(now, now + length)
                now += length + 0.001
            busy.flush()
    for rank in (4, 5):
        with Timeline(directory, "env", rank) as line:
            now = START + 0.2
            while now < START + (steps + 1) * STEP_S:
                line.event("reset", "env", now, rng.uniform(0.002, 0.02))
                for _ in range(4):
                    now += rng.uniform(0.02, 0.06)
                    line.event("step", "env", now, rng.uniform(0.001, 0.01))
                line.event("score", "env", now + 0.012, 0.002)
                if rng.random() < 0.2:
                    line.event("flush", "store", now + 0.02, 0.01)
    with Timeline(directory, "env", 3):
        pass


if __name__ == "__main__":
    make_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60)
