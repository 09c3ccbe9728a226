"""Others' tools read the files: plain h5py, in a process that never saw this package, and h5ls."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rollart.store.batches import BatchWriter
from tests.store.records import open_writer, record

# What an auditor would write from the published schema; run with no path to this package.
AUDITOR = """
import sys, json
import h5py
assert "hpc_rollart" not in sys.modules and "hdf5plugin" not in sys.modules
start, tasks, rewards = {}, {}, {}
with h5py.File(sys.argv[1], "r", swmr=True) as shard:
    names = [name.decode() for name in shard["codes/task"][:]]
    status = [name.decode() for name in shard["codes/status"][:]]
    turns = len(shard["turns"][:])
    for row in shard["trajectories"][:]:
        start[int(row["trajectory"])] = int(row["start_version"])
        rewards[int(row["trajectory"])] = float(row["reward"])
    final = {int(r["trajectory"]): status[r["status"]] for r in shard["trajectories"][:]}
with h5py.File(sys.argv[2], "r", swmr=True) as log:
    consumed = log["consumed"][:]
    assert log.attrs["format"] == "rollart-batches"
stale = [int(c["version"]) - start[int(c["trajectory"])] for c in consumed]
per_step = {}
for c in consumed:
    per_step.setdefault(int(c["step"]), []).append(rewards[int(c["trajectory"])])
print(json.dumps({"stale": stale, "logged": consumed["staleness"].tolist(), "turns": turns, "final": final,
                  "reward": {s: sum(v) / len(v) for s, v in per_step.items()}}))
"""

TOKEN_READER = """
import sys, json
import h5py, hdf5plugin
with h5py.File(sys.argv[1], "r", swmr=True) as shard:
    row = shard["trajectories"][1]
    at, n = int(row["token_offset"]), int(row["token_count"])
    text = bytes(shard["text"][int(row["text_offset"]) : int(row["text_offset"] + row["text_count"])])
    print(json.dumps({"id": shard["tokens/id"][at : at + n].tolist(), "text": json.loads(text)}))
"""


def run_isolated(tmp_path: Path, program: str, *arguments: Path) -> dict:
    command = [sys.executable, "-I", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def writers(tmp_path: Path):
    """A shard and a batch log whose writers are still running."""
    with (
        open_writer(tmp_path) as shard,
        BatchWriter(tmp_path / "batches", run_id="test-run", attempt=0) as log,
    ):
        for trajectory in range(12):
            shard.append(record(trajectory))
        shard.flush()
        shard.set_status(11, "surplus")
        shard.flush()
        log.append(1, 1, [0, 1, 2, 3], [0] * 4, [1] * 4, [0.0] * 4)
        log.append(2, 2, [4, 5, 6, 7], [1] * 4, [2] * 4, [0.0] * 4)
        yield shard, log


def test_plain_h5py_without_any_plugin_recounts_rewards_and_staleness(tmp_path: Path, writers):
    shard, log = writers
    found = run_isolated(tmp_path, AUDITOR, shard.path, log.path)
    assert found["stale"] == found["logged"] == [1] * 4 + [2] * 4
    assert found["turns"] == 12 * 4
    assert found["final"] == {str(t): "surplus" if t == 11 else "ok" for t in range(12)}
    assert found["reward"] == {
        "1": sum(record(t).reward for t in range(4)) / 4,
        "2": sum(record(t).reward for t in range(4, 8)) / 4,
    }


def test_h5py_with_hdf5plugin_reads_tokens_and_text(tmp_path: Path, writers):
    shard, _ = writers
    found = run_isolated(tmp_path, TOKEN_READER, shard.path)
    assert found["id"] == record(1).tokens.tolist()
    assert found["text"] == {"messages": record(1).messages, "info": record(1).info}


def tool(name: str) -> str:
    path = shutil.which(name)
    assert path, f"this test needs {name}: apt-get install -y hdf5-tools"
    return path


def test_h5ls_of_a_distribution_lists_a_closed_shard_and_batch_log(writers):
    shard, log = writers
    shard.close()
    log.close()
    listing = subprocess.run([tool("h5ls"), "-r", shard.path], capture_output=True, text=True, timeout=60)
    assert listing.returncode == 0, listing.stderr
    assert "/trajectories            Dataset {12/Inf}" in listing.stdout
    assert "/tokens/logprob" in listing.stdout
    listing = subprocess.run([tool("h5ls"), log.path], capture_output=True, text=True, timeout=60)
    assert "consumed                 Dataset {8/Inf}" in listing.stdout


def test_h5clear_opens_a_killed_writers_shard_to_tools_that_know_no_swmr(tmp_path: Path):
    program = (
        "import os, sys; from pathlib import Path; from tests.store.records import open_writer, record\n"
        "writer = open_writer(Path(sys.argv[1])); writer.append(record(0)); writer.flush()\n"
        "os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, timeout=60)
    path = tmp_path / "trajectories" / "env-3-0.h5"
    subprocess.run([tool("h5clear"), "-s", path], check=True, timeout=60)
    listing = subprocess.run([tool("h5ls"), path], capture_output=True, text=True, timeout=60)
    assert "trajectories             Dataset {1/Inf}" in listing.stdout
