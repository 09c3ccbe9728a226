"""Trajectory records for the store's tests."""

from pathlib import Path
from typing import Any

import numpy as np

from hpc_rollart.store.writer import ShardWriter, TrajectoryRecord, TurnRecord

TASKS = ["frozen-lake", "chain-sum"]
POOLS = ["compute", "bandwidth"]


def open_writer(run: Path, **changes: Any) -> ShardWriter:
    arguments: dict[str, Any] = {
        "component": "env",
        "rank": 3,
        "run_id": "test-run",
        "host": "node-1",
        "attempt": 0,
        "tasks": TASKS,
        "pools": POOLS,
    }
    return ShardWriter(run / "trajectories", **(arguments | changes))


def record(seed: int, tokens: int = 40, **changes: Any) -> TrajectoryRecord:
    """A trajectory of which everything follows from `seed`, its number unless `changes` say otherwise."""
    trajectory = seed
    rng = np.random.default_rng(trajectory)
    sampled = (np.arange(tokens) % 10 >= 6).astype(np.uint8)
    values: dict[str, Any] = {
        "trajectory": trajectory,
        "group": trajectory // 4,
        "task": trajectory % len(TASKS),
        "status": "ok",
        "stop": "terminated",
        "seed": trajectory * 7,
        "start_version": trajectory // 10,
        "end_version": trajectory // 10 + 1,
        "reward": trajectory % 3 / 2,
        "pool": trajectory % len(POOLS),
        "generator": 1,
        "t_admitted": 1.0e9 + trajectory,
        "t_started": 1.0e9 + trajectory + 0.25,
        "t_finished": 1.0e9 + trajectory + 0.5,
        "t_scored": 1.0e9 + trajectory + 0.75,
        "tokens": rng.integers(0, 50_000, tokens).astype(np.int32),
        "logprobs": np.where(sampled, -rng.random(tokens), np.nan).astype(np.float32),
        "versions": np.where(sampled, trajectory // 10, -1).astype(np.int32),
        "sampled": sampled,
        "turns": [TurnRecord(6, 4, 0.5 * turn, 0.01, 0.002) for turn in range(tokens // 10)],
        "messages": [
            {"role": "user", "content": f"Übung {trajectory}"},
            {"role": "assistant", "content": "→"},
        ],
        "info": {"number": trajectory},
    }
    return TrajectoryRecord(**(values | changes))
