"""What an environment does wrong costs its own episode, and is told with its cause and one line."""

import asyncio
from typing import Any

import psutil
import pytest

from hpc_rollart.rollout.workers import EnvFailure, WorkerPool
from tests.rollout.pools import FAULTY, episode, gone, pool_of, running

SHORT = 0.5


async def failure(pool: WorkerPool, env: str, timeout_s: float = 60.0, **args: Any) -> tuple[str, str]:
    """Play until it fails; then one good episode must run in the same slot."""
    with pytest.raises(EnvFailure) as caught:
        async with pool.lease(FAULTY + env, args) as worker:
            await worker.reset(0, timeout_s=timeout_s)
            await worker.step("1", timeout_s=timeout_s)
    assert len(await episode(pool, 0)) == 3
    assert "\n" not in caught.value.reason
    return caught.value.stop, caught.value.reason


@pytest.mark.parametrize(
    ("how", "where", "stop", "reason"),
    [
        ("raise", "init", "reset_error", "ValueError: as asked"),
        ("raise", "reset", "reset_error", "ValueError: as asked"),
        ("raise", "step", "step_error", "ValueError: as asked"),
        ("exit", "step", "step_error", "SystemExit: 3"),
        ("os_exit", "step", "worker_died", "exited with code 3 during step"),
        ("kill", "init", "worker_died", "killed by signal 9 during reset"),
        ("kill", "reset", "worker_died", "killed by signal 9 during reset"),
        ("kill", "step", "worker_died", "killed by signal 9 during step"),
    ],
)
async def test_a_failure_is_told_with_its_cause(how: str, where: str, stop: str, reason: str) -> None:
    async with pool_of(1) as pool:
        assert await failure(pool, "FailsNow", how=how, where=where) == (stop, reason)


@pytest.mark.parametrize("how", ["hang", "spin"])
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_an_environment_that_hangs_is_killed_at_its_timeout(how: str, where: str) -> None:
    async with pool_of(1) as pool:
        await episode(pool, 0)  # The worker's modules are imported before the short timeout counts.
        with pytest.raises(EnvFailure) as caught:
            async with pool.lease(FAULTY + "FailsNow", {"how": how, "where": where}) as worker:
                pid = worker.pid
                await worker.reset(0, timeout_s=SHORT if where == "reset" else 60.0)
                await worker.step("1", timeout_s=SHORT)
        assert (caught.value.stop, caught.value.reason) == (f"{where}_timeout", "no answer within 0.5 s")
        assert len(await episode(pool, 0)) == 3
        assert pid is not None and running([pid]) == []


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("reset_bytes", "reset returned observation b'seen' (bytes), not a str"),
        ("reset_none", "reset returned observation None (NoneType), not a str"),
        ("bytes", "step returned observation b'seen' (bytes), not a str"),
        ("none", "step returned None (NoneType), not (observation, reward, terminated, truncated, info)"),
        ("nan", "step returned reward nan (float), not a finite number"),
        ("infinite", "step returned reward np.float32(inf) (float32), not a finite number"),
        ("no_number", "step returned reward '1.0' (str), not a finite number"),
        ("int_flag", "step returned terminated 1 (int), not a bool"),
        ("no_info", "step returned info None (NoneType), not a dict"),
        ("too_huge", "an answer of 128 MiB is too large"),
    ],
)
async def test_what_is_no_observation_is_refused(what: str, reason: str) -> None:
    async with pool_of(1) as pool:
        assert await failure(pool, "Returns", what=what) == ("bad_observation", reason)


async def test_wrong_arguments_fail_the_reset_with_the_config_message() -> None:
    async with pool_of(1) as pool, pool.lease("frozen-lake", {"sise": 4}) as worker:
        with pytest.raises(EnvFailure, match=r"reset_error: EnvConfigError: .*did you mean 'size'"):
            await worker.reset(0, 60.0)


async def test_a_step_before_a_reset_is_an_error_of_the_episode() -> None:
    async with pool_of(1) as pool, pool.lease(FAULTY + "Steady", {}) as worker:
        with pytest.raises(EnvFailure, match="step_error: RuntimeError: step before reset"):
            await worker.step("1", 60.0)


async def test_failures_of_some_episodes_leave_all_others_alone() -> None:
    async with pool_of(4) as pool:
        results = await asyncio.gather(
            *(episode(pool, seed, FAULTY + "RaisesOnThirdReset") for seed in range(30)),
            return_exceptions=True,
        )
        failed = [seed for seed, result in enumerate(results) if isinstance(result, EnvFailure)]
        assert failed == list(range(0, 30, 3))
        assert {str(results[seed]) for seed in failed} == {
            "reset_error: ConnectionRefusedError: the simulator refused"
        }
        assert all(len(result) == 3 for result in results if isinstance(result, list))


async def test_a_worker_that_dies_idle_is_replaced_unnoticed() -> None:
    async with pool_of(1) as pool:
        async with pool.lease(FAULTY + "Steady", {}) as worker:
            await worker.reset(0, 60.0)
        assert worker.pid is not None
        psutil.Process(worker.pid).kill()
        await asyncio.wait_for(asyncio.shield(worker.exited), 10.0)
        assert len(await episode(pool, 0)) == 3


async def test_when_the_worker_server_dies_its_episodes_fail_and_the_next_ones_run() -> None:
    async with pool_of(2) as pool:
        with pytest.raises(EnvFailure, match="worker_died: worker server died during step"):
            async with pool.lease(FAULTY + "SleepsForEver", {}) as worker:
                await worker.reset(0, 60.0)
                asyncio.get_running_loop().call_later(0.2, psutil.Process(pool.pids[0]).kill)
                await worker.step("1", 60.0)
        assert worker.pid is not None
        await gone([worker.pid])
        assert len(await episode(pool, 0)) == 3


# --- cancelling ------------------------------------------------------------------------------------


async def cancelled_mid_step(pool: WorkerPool, env: str, timeout_s: float, **args: Any) -> int:
    """Cancel an episode while its step is under way; returns the worker's process id."""
    stepping = asyncio.Event()
    pids: list[int | None] = []

    async def play() -> None:
        async with pool.lease(FAULTY + env, args) as worker:
            await worker.reset(0, 60.0)
            pids.append(worker.pid)
            stepping.set()
            await worker.step("1", timeout_s)

    task = asyncio.create_task(play())
    await stepping.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pids[0] is not None
    return pids[0]


async def test_a_worker_cancelled_mid_step_finishes_it_and_is_used_again() -> None:
    async with pool_of(2) as pool:
        pid = await cancelled_mid_step(pool, "Steady", 60.0, latency_s=0.3)
        await asyncio.sleep(0.6)
        async with pool.lease(FAULTY + "Steady", {"latency_s": 0.3}) as worker:
            assert worker.pid == pid
            assert await worker.reset(9, 60.0) == "seed 9 reset 2", "not the cancelled step's answer"


async def test_a_worker_cancelled_mid_step_is_killed_when_the_step_times_out() -> None:
    async with pool_of(2) as pool:
        await gone([await cancelled_mid_step(pool, "SleepsForEver", SHORT)])


async def test_a_worker_cancelled_mid_step_is_killed_when_its_slot_is_needed() -> None:
    async with pool_of(1) as pool:
        pid = await cancelled_mid_step(pool, "SleepsForEver", 600.0)
        assert len(await episode(pool, 0)) == 3
        await gone([pid])


async def test_cancelling_while_waiting_for_a_slot_loses_no_slot() -> None:
    async with pool_of(1) as pool:
        async with pool.lease(FAULTY + "Steady", {}):
            waiting = [asyncio.create_task(episode(pool, seed)) for seed in range(3)]
            await asyncio.sleep(0.05)
            for task in waiting[:2]:
                task.cancel()
        assert len(await waiting[2]) == 3


async def test_storms_of_cancels_and_failures_leave_every_slot_usable() -> None:
    async with pool_of(4) as pool:
        for _ in range(6):
            tasks = [
                asyncio.create_task(episode(pool, s, FAULTY + "Flaky", latency_s=0.01)) for s in range(12)
            ]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert all(len(r) == 3 for r in await asyncio.gather(*(episode(pool, seed) for seed in range(8))))
        assert len(running(pool.pids[1:])) <= 4
