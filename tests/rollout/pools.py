"""What the tests of worker processes share: a pool that leaves nothing behind, an episode, who still runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psutil

from hpc_rollart.rollout.workers import StepResult, WorkerPool

FAULTY = "tests.rollout.faulty_envs:"


@contextlib.asynccontextmanager
async def pool_of(slots: int) -> AsyncIterator[WorkerPool]:
    """A pool whose every process is gone afterwards."""
    pool = WorkerPool(slots)
    await pool.start()
    try:
        yield pool
    finally:
        pids = pool.pids
        await pool.close(deadline_s=10.0)
        assert running(pids) == []


async def episode(pool: WorkerPool, seed: int, env: str = FAULTY + "Steady", **args: Any) -> list[StepResult]:
    results: list[StepResult] = []
    async with pool.lease(env, args) as worker:
        await worker.reset(seed, timeout_s=60.0)
        while not results or not (results[-1].terminated or results[-1].truncated):
            results.append(await worker.step(f"move {len(results)}", timeout_s=60.0))
    return results


def running(pids: list[int]) -> list[int]:
    """Those that run; a zombie does not, and reaping an orphan is process 1's business."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


async def gone(pids: list[int], deadline_s: float = 20.0) -> None:
    """Wait until none of them runs."""
    async with asyncio.timeout(deadline_s):
        while running(pids):
            await asyncio.sleep(0.01)
