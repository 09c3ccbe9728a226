"""Everything flushed outlives kill -9, and is readable while its writer still runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest

from hpc_rollart.store.reader import open_run
from tests.store.records import record

ROOT = Path(__file__).parents[2]
WRITER = """
import sys
from pathlib import Path
from tests.store.records import open_writer, record
writer = open_writer(Path(sys.argv[1]), rotate_mb=0.3)
trajectory = 0
while True:
    for _ in range(9):
        writer.append(record(trajectory, tokens=200))
        trajectory += 1
    if trajectory > 20:
        writer.set_status(trajectory - 20, "stale")
    writer.flush()
    print(trajectory, flush=True)
"""


def start_writer(run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def assert_prefix_of_the_writer(run: Path, at_least: int) -> None:
    data = open_run(run)
    rows = data.trajectories()
    assert len(rows) >= at_least
    assert sorted(rows["trajectory"]) == list(range(len(rows)))
    for trajectory in {0, at_least // 2, at_least - 1, len(rows) - 1}:
        expected = record(trajectory, tokens=200)
        assert (data.tokens_of(trajectory).id == expected.tokens).all()
        assert len(data.turns_of(trajectory)) == len(expected.turns)
        assert data.messages_of(trajectory) == expected.messages


@pytest.mark.parametrize("flushes", [1, 2, 5, 11, 23, 40])
def test_kill_9_of_a_writer_loses_nothing_it_had_flushed(tmp_path: Path, flushes: int):
    process = start_writer(tmp_path)
    assert process.stdout is not None
    flushed = 0
    for _ in range(flushes):
        flushed = int(process.stdout.readline())
    # Land somewhere in the middle of the next writes, another place in every trial.
    time.sleep(0.003 * (flushes % 7))
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    assert_prefix_of_the_writer(tmp_path, flushed)
    assert open_run(tmp_path).problems == []


def test_rows_are_readable_while_the_writer_runs(tmp_path: Path):
    process = start_writer(tmp_path)
    assert process.stdout is not None
    try:
        for _ in range(12):
            flushed = int(process.stdout.readline())
            assert_prefix_of_the_writer(tmp_path, flushed)
    finally:
        process.kill()
        process.wait(30)


def test_a_reader_that_stays_open_sees_new_rows_after_refresh(tmp_path: Path):
    process = start_writer(tmp_path)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        with h5py.File(tmp_path / "trajectories" / "env-3-0.h5", "r", swmr=True) as file:
            rows = file["trajectories"]
            for _ in range(4):
                flushed = int(process.stdout.readline())
                rows.refresh()
                assert len(rows) >= flushed
                assert rows[flushed - 1]["trajectory"] == flushed - 1
    finally:
        process.kill()
        process.wait(30)


def test_a_row_never_becomes_visible_before_its_tokens_and_text(tmp_path: Path):
    process = start_writer(tmp_path)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        path = tmp_path / "trajectories" / "env-3-0.h5"
        for _ in range(200):
            with h5py.File(path, "r", swmr=True) as file:
                rows = file["trajectories"][:]
                for name, offset, count in (
                    ("tokens/sampled", "token_offset", "token_count"),
                    ("text", "text_offset", "text_count"),
                    ("turns", "turn_offset", "turns"),
                ):
                    dataset = file[name]
                    dataset.refresh()
                    assert len(dataset) >= int(rows[-1][offset]) + int(rows[-1][count])
    finally:
        process.kill()
        process.wait(30)
