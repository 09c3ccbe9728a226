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
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[1]

PAYLOAD: dict[str, Any] = {"trajectory": 123456, "reward": 1.0, "turns": 4, "tokens": 812, "task": "digits"}
WARM_UP, ROUND_TRIPS, ONE_WAY, LARGE_REPEATS = 300, 2000, 10_000, 15
LARGE_BYTES = 16 << 20
MAX_RATIO_TO_MPI, MIN_RATIO_TO_RAY = 5.0, 20.0


class Small(msgspec.Struct, tag=True, frozen=True):
    """The payload of the round trips."""

    trajectory: int
    reward: float
    turns: int
    tokens: int
    task: str


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
    figures = {"mpi_us": bare_round_trip(comm)}
    figures |= asyncio.run(mailbox_figures(comm))
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

    mailbox = Mailbox(comm.Dup(), Small | Large | Done)
    ended = asyncio.Event()
    received = 0

    def count(source: int, message: Small) -> None:
        nonlocal received
        received += 1
        if received == ONE_WAY:
            mailbox.send(source, Done())

    mailbox.on_request(Small, lambda source, message, reply: reply(message))
    mailbox.on_request(Large, lambda source, message, reply: reply(Done()))
    mailbox.on(Small if comm.rank == 2 else Done, lambda source, message: ended.set())
    runner = asyncio.create_task(mailbox.run())
    figures: dict[str, float] = {}
    if comm.rank == 0:
        small, large = Small(**PAYLOAD), Large(np.ones(LARGE_BYTES, np.uint8))
        figures["mailbox_us"] = 1e6 * median(await timed(mailbox, small, WARM_UP, ROUND_TRIPS))
        seconds = median(await timed(mailbox, large, 3, LARGE_REPEATS))
        figures["mailbox_gb_s"] = LARGE_BYTES / seconds / 1e9
    runner.cancel()
    return figures
