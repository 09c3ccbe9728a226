"""No process is left behind: not by a close, not by a SIGKILL of the rank, not under MPI."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.pools import FAULTY, gone, pool_of, running

ROOT = Path(__file__).parents[2]

RANK = """
import asyncio, sys
from hpc_rollart.rollout.workers import WorkerPool

async def main():
    pool = WorkerPool(4)
    await pool.start()
    async def play(env, args):
        async with pool.lease("tests.rollout.faulty_envs:" + env, args) as worker:
            await worker.reset(0, 60.0)
            await worker.step("1", 600.0)
    tasks = [asyncio.create_task(play(*what)) for what in (
        ("FailsNow", {"how": "hang"}), ("FailsNow", {"how": "spin"}),
        ("FailsNow", {"how": "hang_with_child"}), ("FailsNow", {"how": "hang"}),
    )]
    await asyncio.sleep(1.5)
    print("pids", *pool.pids, flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["rank", "server"])
async def test_a_sigkill_leaves_no_process_behind_even_when_environments_hang(victim: str) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert rank.stdout is not None
    lines: list[list[str]] = []
    while not (lines and lines[-1][0] == "pids"):
        line = rank.stdout.readline()
        assert line, "the rank ended early"
        lines.append(line.split())
    pids = [int(pid) for words in lines if words[0] in ("pids", "child") for pid in words[1:]]
    assert len(pids) == 1 + 4 + 1, "the server, four workers and a worker's own child"
    try:
        os.kill(rank.pid if victim == "rank" else pids[0], signal.SIGKILL)
        # The child of a worker is killed by the server; if that itself is killed, only workers are.
        sure = pids if victim == "rank" else [pid for pid in pids if pid != _child(lines)]
        await gone(sure)
    finally:
        rank.kill()
        rank.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _child(lines: list[list[str]]) -> int:
    return next(int(words[1]) for words in lines if words[0] == "child")


async def test_close_lets_idle_workers_go_and_kills_the_ones_that_hang() -> None:
    async with pool_of(2) as pool:
        async with pool.lease(FAULTY + "Steady", {}) as worker:
            await worker.reset(0, 60.0)

        async def hang() -> None:
            async with pool.lease(FAULTY + "SleepsForEver", {}) as worker:
                await worker.reset(0, 60.0)
                await worker.step("1", 600.0)

        hanging = asyncio.create_task(hang())
        await asyncio.sleep(0.5)
        pids = pool.pids
        assert len(pids) == 3
        await pool.close(deadline_s=2.0)
        assert running(pids) == []
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)


async def test_close_closes_the_environments_of_idle_workers(tmp_path: Path) -> None:
    async with (
        pool_of(1) as pool,
        pool.lease(FAULTY + "NotesItsClose", {"path": str(tmp_path / "note")}) as env,
    ):
        await env.reset(0, 60.0)
    assert (tmp_path / "note").read_text() == "closed"


MPI_RANK = """
import asyncio, os
if "{order}" == "after":
    from mpi4py import MPI
from hpc_rollart.rollout.workers import WorkerPool

async def main():
    pool = WorkerPool(2)
    await pool.start()
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    for seed in range(3):
        comm.Barrier()
        async with pool.lease("tests.rollout.faulty_envs:Reports", {{}}) as worker:
            await worker.reset(seed, 60.0)
            info = (await worker.step("1", 60.0)).info
        ours = [name for name in info["environ"] if name.startswith(("OMPI_", "PMIX_", "PRTE_"))]
        assert not ours and info["libraries"] == 0 and info["modules"] == [], info
        assert comm.allreduce(1) == 2
    await pool.close(5.0)
    print("rank", comm.rank, "fine", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_workers_start_before_or_after_mpi_init_and_know_nothing_of_mpi(order: str) -> None:
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        pytest.fail("no mpirun beside this Python: run make venv")
    allow = {f"{a}_ALLOW_RUN_AS_ROOT{b}": "1" for a in ("OMPI", "PRTE") for b in ("", "_CONFIRM")}
    command = [str(mpirun), "--bind-to", "none", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*command, sys.executable, "-c", MPI_RANK.format(order=order)],
        env=os.environ | allow,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "fine" in line) == [
        "rank 0 fine",
        "rank 1 fine",
    ]
