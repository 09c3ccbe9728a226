"""Times the mailbox against bare mpi4py and against Ray actor calls, in one run on one machine.

    python benchmarks/mailbox.py [--ray-python PATH]

Goals: a round trip of at most 5 times that of bare mpi4py, and at least 20 times faster than that of a
Ray actor call. The same payload travels on both sides, after the same warm-up; figures are medians.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[1]

PAYLOAD: dict[str, Any] = {"trajectory": 123456, "reward": 1.0, "turns": 4, "tokens": 812, "task": "digits"}
WARM_UP, ROUND_TRIPS = 300, 2000
ONE_WAY, RATE_REPEATS = 5000, 3
LARGE_BYTES, LARGE_WARM_UP, LARGE_REPEATS = 16 << 20, 3, 15
DEADLINE_S = 60.0
MAX_RATIO_TO_MPI, MIN_RATIO_TO_RAY = 5.0, 20.0


class Small(msgspec.Struct, tag=True, frozen=True):
    """The small payload, sent one way."""

    trajectory: int
    reward: float
    turns: int
    tokens: int
    task: str


class Echo(Small, tag=True, frozen=True):
    """The small payload, sent there and back."""


class Large(msgspec.Struct, tag=True, frozen=True):
    """An array of 16 MiB."""

    data: np.ndarray


class Done(msgspec.Struct, tag=True, frozen=True):
    """Answers to a large array, and ends the benchmark."""


# --- ranks -------------------------------------------------------------------------------------------


def rank_main(result_path: str) -> None:
    """What each of the two ranks runs; rank 0 measures and writes the figures."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    figures = {"mpi": {"trip_us": bare_round_trip(comm)}, "mailbox": asyncio.run(mailbox_figures(comm))}
    if comm.rank == 0:
        Path(result_path).write_text(json.dumps(figures))


def bare_round_trip(comm: Any) -> float:
    """Median microseconds of pickled `send` and `recv` of the payload, there and back."""
    times = []
    for _ in range(WARM_UP + ROUND_TRIPS):
        if comm.rank == 0:
            start = time.perf_counter()
            comm.send(PAYLOAD, 1)
            comm.recv(source=1)
            times.append(time.perf_counter() - start)
        else:
            comm.send(comm.recv(source=0), 0)
    return median(times[WARM_UP:]) * 1e6 if times else 0.0


async def mailbox_figures(comm: Any) -> dict[str, float]:
    """Round trip, messages a second and bandwidth of the mailbox between ranks 0 and 1."""
    from hpc_rollart.fabric import Mailbox

    mailbox = Mailbox(comm, Small | Echo | Large | Done)
    ended = asyncio.Event()
    received = 0

    def count(source: int, message: Small) -> None:
        nonlocal received
        received += 1
        if received % ONE_WAY == 0:
            mailbox.send(source, Done())

    mailbox.on(Small, count)
    mailbox.on(Done, lambda source, message: ended.set())
    mailbox.on_request(Echo, lambda source, message, reply: reply(message))
    mailbox.on_request(Large, lambda source, message, reply: reply(Done()))
    runner = asyncio.create_task(mailbox.run())
    if comm.rank == 1:
        await ended.wait()
        runner.cancel()
        return {}

    async def timed(message: msgspec.Struct, warm_up: int, repeats: int) -> float:
        times = []
        for _ in range(warm_up + repeats):
            start = time.perf_counter()
            await mailbox.request(1, message, DEADLINE_S)
            times.append(time.perf_counter() - start)
        return median(times[warm_up:])

    trip_s = await timed(Echo(**PAYLOAD), WARM_UP, ROUND_TRIPS)
    large_s = await timed(Large(np.ones(LARGE_BYTES, np.uint8)), LARGE_WARM_UP, LARGE_REPEATS)
    rates = []
    for _ in range(RATE_REPEATS):
        ended.clear()
        start = time.perf_counter()
        for _ in range(ONE_WAY):
            mailbox.send(1, Small(**PAYLOAD))
        await asyncio.wait_for(ended.wait(), DEADLINE_S)
        rates.append(ONE_WAY / (time.perf_counter() - start))
    mailbox.send(1, Done())
    await mailbox.drain(DEADLINE_S)
    runner.cancel()
    return {"trip_us": 1e6 * trip_s, "messages_per_s": median(rates), "gb_per_s": LARGE_BYTES / large_s / 1e9}


def run_ranks() -> dict[str, dict[str, float]]:
    """Start two ranks under mpirun and return rank 0's figures."""
    mpirun = Path(sys.executable).parent / "mpirun"
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        env[name] = env[name + "_CONFIRM"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        command = [str(mpirun), "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "-n", "2"]
        command += [sys.executable, __file__, "--as-rank", str(result)]
        subprocess.run(command, env=env, check=True, timeout=300)
        figures: dict[str, dict[str, float]] = json.loads(result.read_text())
        return figures


# --- Ray ---------------------------------------------------------------------------------------------


def ray_main(result_path: str) -> None:
    """What the interpreter that has Ray runs: the same payloads to one actor."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)

    @ray.remote
    class Peer:
        def echo(self, message: Any) -> Any:
            return message

        def take(self, message: Any) -> None:
            return None

    peer: Any = Peer.remote()  # type: ignore[attr-defined]

    def timed(method: Any, message: Any, warm_up: int, repeats: int) -> float:
        times = []
        for _ in range(warm_up + repeats):
            start = time.perf_counter()
            ray.get(method.remote(message))
            times.append(time.perf_counter() - start)
        return median(times[warm_up:])

    trip_s = timed(peer.echo, PAYLOAD, WARM_UP, ROUND_TRIPS)
    large_s = timed(peer.take, np.ones(LARGE_BYTES, np.uint8), LARGE_WARM_UP, LARGE_REPEATS)
    rates = []
    for _ in range(RATE_REPEATS):
        start = time.perf_counter()
        ray.get([peer.take.remote(PAYLOAD) for _ in range(ONE_WAY)])
        rates.append(ONE_WAY / (time.perf_counter() - start))
    ray.shutdown()
    figures = {
        "trip_us": 1e6 * trip_s,
        "messages_per_s": median(rates),
        "gb_per_s": LARGE_BYTES / large_s / 1e9,
    }
    Path(result_path).write_text(json.dumps(figures))


def run_ray(python: str) -> dict[str, float]:
    """Measure Ray with the given interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        command = [python, __file__, "--as-ray", str(result)]
        subprocess.run(command, check=True, timeout=300, env=dict(os.environ, OMP_NUM_THREADS="1"))
        figures: dict[str, float] = json.loads(result.read_text())
        return figures


# --- the table ---------------------------------------------------------------------------------------


def report(mpi: dict[str, float], mailbox: dict[str, float], ray: dict[str, float]) -> bool:
    """Print the table; whether both goals are met."""
    to_mpi = mailbox["trip_us"] / mpi["trip_us"]
    to_ray = ray["trip_us"] / mailbox["trip_us"]
    rate, bandwidth = "messages_per_s", "gb_per_s"
    rows = [
        ("small round trip, us", mpi["trip_us"], mailbox["trip_us"], ray["trip_us"], to_ray),
        ("small one way, messages/s", None, mailbox[rate], ray[rate], mailbox[rate] / ray[rate]),
        ("16 MiB array, GB/s", None, mailbox[bandwidth], ray[bandwidth], mailbox[bandwidth] / ray[bandwidth]),
    ]
    print(f"{'':28}{'bare mpi4py':>14}{'mailbox':>14}{'Ray actor':>14}{'mailbox is':>18}")
    for name, bare, ours, rays, ratio in rows:
        first = "" if bare is None else f"{bare:,.1f}"
        print(f"{name:28}{first:>14}{ours:>14,.1f}{rays:>14,.1f}{ratio:>11.1f} x Ray")
    goals = [
        (f"round trip at most {MAX_RATIO_TO_MPI:g} x bare mpi4py", to_mpi, to_mpi <= MAX_RATIO_TO_MPI),
        (f"round trip at least {MIN_RATIO_TO_RAY:g} x faster than Ray", to_ray, to_ray >= MIN_RATIO_TO_RAY),
    ]
    for goal, value, met in goals:
        print(f"{'pass' if met else 'FAIL'}: {goal}: {value:.1f}")
    return all(met for _, _, met in goals)


def main() -> int:
    """Run all and print the table; 0 when both goals are met, 1 when not, 2 when Ray is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that can import ray")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--as-ray", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank_main(options.as_rank)
        return 0
    if options.as_ray:
        ray_main(options.as_ray)
        return 0
    if subprocess.run(
        [options.ray_python, "-c", "import ray, msgspec, numpy"], stderr=subprocess.DEVNULL
    ).returncode:
        print(
            f"{options.ray_python} has no Ray to compare with: make a virtual environment of its own, "
            "`pip install ray numpy msgspec` there, and give its interpreter with --ray-python",
            file=sys.stderr,
        )
        return 2
    ranks = run_ranks()
    return 0 if report(ranks["mpi"], ranks["mailbox"], run_ray(options.ray_python)) else 1


if __name__ == "__main__":
    sys.exit(main())
