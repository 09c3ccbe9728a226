"""Worker processes: episodes through few workers, and what a worker sees of the world."""

import asyncio
import os
from typing import Any

import pytest

from hpc_rollart.rollout.worker_server import worker_environment
from hpc_rollart.rollout.workers import EnvFailure, StepResult, WorkerPool
from tests.rollout.pools import FAULTY, episode, pool_of


async def look(pool: WorkerPool) -> dict[str, Any]:
    return (await episode(pool, 0, FAULTY + "Reports"))[0].info


async def test_an_episode_runs_in_a_worker() -> None:
    async with pool_of(1) as pool:
        results = await episode(pool, seed=5, turns=2)
        assert results == [
            StepResult("turn 1", 1.0, False, False, {"said": "move 0"}),
            StepResult("turn 2", 1.0, True, False, {"said": "move 1"}),
        ]


@pytest.mark.parametrize(
    ("env", "args"),
    [("frozen-lake", {"size": 3}), ("reasoning-gym", {"task": "mini_sudoku"})],
)
async def test_built_in_environments_play_the_same_episode_in_any_worker(
    env: str, args: dict[str, Any]
) -> None:
    async with pool_of(2) as pool, pool.lease(env, args) as one, pool.lease(env, args) as other:
        assert await one.reset(7, 60.0) == await other.reset(7, 60.0) != await other.reset(8, 60.0)
        assert one.number != other.number


async def test_many_episodes_go_through_few_workers_which_keep_their_environment() -> None:
    async with pool_of(3) as pool:
        await asyncio.gather(*(episode(pool, seed) for seed in range(60)))
        assert len(pool.pids) <= 1 + 3
        async with pool.lease(FAULTY + "Steady", {}) as worker:
            observation = await worker.reset(1, 60.0)
        assert int(observation.split()[-1]) > 60 // 3 / 2, "the environment's own count of its resets"


async def test_another_environment_or_other_arguments_are_made_anew_in_the_same_worker() -> None:
    async with pool_of(1) as pool:
        assert len(await episode(pool, 0, turns=2)) == 2
        assert len(await episode(pool, 0, turns=4)) == 4
        assert (await episode(pool, 0, "reasoning-gym", task="chain_sum"))[0].terminated
        assert len(pool.pids) == 1 + 1


async def test_sixty_four_workers_start_and_play_at_once() -> None:
    async with pool_of(64) as pool:
        met = asyncio.Event()
        playing = 0

        async def play(seed: int) -> str:
            nonlocal playing
            async with pool.lease(FAULTY + "Steady", {}) as worker:
                observation = await worker.reset(seed, 120.0)
                playing += 1
                if playing == 64:
                    met.set()
                await met.wait()
            return observation

        observations = await asyncio.wait_for(asyncio.gather(*(play(seed) for seed in range(64))), 120.0)
        assert observations == [f"seed {seed} reset 1" for seed in range(64)]
        assert len(pool.pids) == 1 + 64


async def test_a_lease_waits_for_a_slot_until_its_deadline_and_names_the_host() -> None:
    async with pool_of(1) as pool, pool.lease(FAULTY + "Steady", {}):
        with pytest.raises(TimeoutError, match=f"slot of 1 on {os.uname().nodename} came free in 0.05 s"):
            async with pool.lease(FAULTY + "Steady", {}, deadline_s=0.05):
                pass


async def test_workers_see_no_mpi_no_slurm_no_gpu_and_run_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PRTE_LAUNCHED", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("KEPT", "yes")
    async with pool_of(1) as pool:
        await episode(pool, 0, "frozen-lake", max_steps=1)
        await episode(pool, 0, "reasoning-gym", task="chain_sum")
        seen = await look(pool)
    names = set(seen["environ"])
    assert not {name for name in names if name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_"))}
    assert seen["environ"]["OMP_NUM_THREADS"] == "1" and seen["environ"]["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["environ"]["KEPT"] == "yes"
    assert seen["threads"] == 1


async def test_workers_load_neither_torch_nor_mpi_and_inherit_no_socket_but_their_own() -> None:
    async with pool_of(3) as pool, pool.lease(FAULTY + "Steady", {}) as first:
        await first.reset(0, 60.0)
        seen = await look(pool)
    assert seen["modules"] == [] and seen["libraries"] == 0
    assert len([name for name in seen["fds"] if name.startswith("socket")]) == 1


async def test_the_global_random_generators_follow_the_seed() -> None:
    env = FAULTY + "Reports"
    async with pool_of(2) as pool, pool.lease(env, {}) as one, pool.lease(env, {}) as other:
        assert await one.reset(1, 60.0) == await other.reset(1, 60.0) != await other.reset(2**63, 60.0)


async def test_what_an_environment_prints_goes_to_the_log_and_not_into_the_protocol(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with pool_of(1) as pool:
        await episode(pool, 0, FAULTY + "Noisy")
    out, err = capfd.readouterr()
    assert {"from reset", "below python", "from a child"} <= set(out.splitlines())
    assert "to stderr" in err


async def test_an_answer_of_a_megabyte_arrives_whole() -> None:
    async with pool_of(1) as pool:
        assert (await episode(pool, 0, FAULTY + "Returns", what="huge"))[0].observation == "x" * 2**20
        async with pool.lease(FAULTY + "Steady", {}) as worker:
            await worker.reset(0, 60.0)
            said = "y" * 2**20
            assert (await worker.step(said, 60.0)).info == {"said": said}


async def test_numpy_values_become_plain_ones_and_info_becomes_json() -> None:
    async with pool_of(1) as pool:
        assert (await episode(pool, 0, FAULTY + "Returns", what="numpy"))[0] == StepResult(
            "seen",
            0.5,
            True,
            False,
            {
                "array": [0, 1, 2],
                "nan": "nan",
                "big": str(2**70),
                "3": [1, [2]],
                "object": "<class 'object'>",
                "text": "?",
            },
        )
        assert (await episode(pool, 0, FAULTY + "Returns", what="surrogate"))[0].observation == "half ? pair"


async def test_a_closed_pool_gives_no_worker() -> None:
    async with pool_of(1) as pool:
        await episode(pool, 0)
    with pytest.raises(RuntimeError, match="closed"):
        await episode(pool, 0)


async def test_workers_survive_the_signals_that_are_the_ranks_to_handle() -> None:
    async with pool_of(1) as pool, pool.lease(FAULTY + "Steady", {"latency_s": 0.2}) as worker:
        await worker.reset(0, 60.0)
        for number in (1, 2, 10, 12, 15):
            stepping = asyncio.create_task(worker.step("3", 60.0))
            await asyncio.sleep(0.05)
            for pid in pool.pids:
                os.kill(pid, number)
            assert (await stepping).reward == 1.0


def test_worker_environment_changes_nothing_else() -> None:
    kept = {"PATH": "/bin", "ROLLART_COMPONENT": "env", "MY_SLURM_NOTE": "x"}
    assert {k: v for k, v in worker_environment(kept | {"SLURM_NODEID": "0"}).items() if k in kept} == kept


def test_a_failure_reads_as_its_cause_and_reason() -> None:
    assert str(EnvFailure("step_error", "ValueError: as asked")) == "step_error: ValueError: as asked"
