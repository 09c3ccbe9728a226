"""Seconds from `hpc-rollart submit` to the first training step, beside a plain job of the same shape.

    python -m slurm.testbed up
    python benchmarks/submission.py [--repeats 3] [--patience 600]

The quickstart is submitted to the testbed (docs/testbed.md) and timed by what it puts on record itself:
jobs.jsonl, events.jsonl, the timelines, and the times of the script and the log. The peer is a batch script
with the same `#SBATCH` lines that runs `srun hostname` on all components and nothing else. Both take turns on
an idle cluster; figures are medians. The policy is made beforehand and not timed.

Goal: what this program adds itself takes less than 15 s: its command until sbatch is called, its supervisor
until the ranks are started, and the ranks until all are ready. Slurm's own time and the first batch are not
part of it. With ROLLART_TESTBED_DIR the testbed is another one, which nobody else uses.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from hpc_rollart.observe.status import read_status

ROOT = Path(__file__).resolve().parents[1]
TESTBED = Path(os.environ.get("ROLLART_TESTBED_DIR", "/var/lib/rollart-testbed"))
CLI = [str(Path(sys.executable).parent / "hpc-rollart")]
CONF = "conf/quickstart.yaml"
SETTINGS = {"run.steps": 6, "algorithm.warmup_steps": 1}

MAX_OURS_S = 15.0
IDLE_BUSY, IDLE_LOAD = 0.15, 1.5
DEADLINE_S = 300.0
# Its options are the run's own: only what names the run and its folder is left out.
NOT_THE_SHAPE = ("job-name", "output", "open-mode", "chdir", "signal")

OURS, SLURM, WORK = "hpc-rollart", "Slurm", "the run"
# Each part ends at the moment of its name; the first begins with the command.
PARTS = (
    ("script", "submit: Python, checks, script", OURS),
    ("answered", "sbatch has answered", SLURM),
    ("started", "queue: the batch step starts", SLURM),
    ("supervising", "supervisor: Python, libraries", OURS),
    ("attempt", "nodes checked, model found", OURS),
    ("joined", "mpirun: all ranks in the world", OURS),
    ("ready", "libraries, model: all said hello", OURS),
    ("batch", "first batch rolled out", WORK),
    ("trained", "first step trained", WORK),
)
PLAIN_PARTS = (("answered", "answered"), ("started", "started"), ("ran", "joined"))
"""The plain job's moments, and the run's with which each is compared."""

Moments = dict[str, float]


class Failed(Exception):
    """A job did not do what is to be timed."""


# --- one submission ----------------------------------------------------------------------------------


def time_run(run_dir: Path) -> Moments:
    """Submit the quickstart, wait until it is done, and return when each part of it ended."""
    line = [*CLI, "submit", CONF, "--cluster", "testbed", "--time", "10m", "--dir", str(run_dir)]
    moments = {"began": time.time()}
    _run([*line, *_overrides()])
    job = _lines(run_dir / "slurm" / "jobs.jsonl")[-1]
    try:
        _wait_for(str(job["job"]))
    finally:
        _cancel(str(job["job"]))
    state = (read_status(run_dir) or {}).get("state")
    if state != "done":
        raise Failed(f"the run is {state or 'not begun'} though its job has ended; see {job['log']}")
    events = {event["event"]: event["t"] for event in _lines(run_dir / "slurm" / "events.jsonl")}
    timelines = [_lines(path) for path in (run_dir / "timeline").glob("*.jsonl")]
    joined = [event["t"] for events in timelines for event in events if event["name"] == "attempt"]
    ranks = sum(part["ranks"] for part in job["components"])
    if len(joined) != ranks:
        raise Failed(f"{len(joined)} of {ranks} ranks are in {run_dir}/timeline: more than one attempt?")
    # The first episode begins once all ranks have said hello, and not before.
    ready = min(event["t"] for events in timelines for event in events if event["name"] == "episode")
    trained = next(e for events in timelines for e in events if e["name"] == "train" and e["step"] == 0)
    return moments | {
        "script": os.stat(job["script"]).st_mtime,
        "answered": job["submitted"],
        "started": _born(Path(job["log"])),
        "supervising": events["job starts"],
        "attempt": events["attempt starts"],
        "joined": max(joined),
        "ready": ready,
        "batch": trained["t"],
        "trained": trained["t"] + trained["d"],
    }


def time_plain(folder: Path, shape: list[str]) -> Moments:
    """Submit a job of that shape that runs `hostname` everywhere, and return when each part of it ended."""
    folder.mkdir(parents=True)
    log, script = folder / "log", folder / "plain.sh"
    components = 1 + sum("hetjob" in line for line in shape)
    groups = f" --het-group=0-{components - 1}" if components > 1 else ""
    command = f"srun{groups} hostname && date +'done %s.%N'"
    script.write_text("\n".join(["#!/bin/bash", f"#SBATCH --output={log}", *shape, command]) + "\n")
    began = time.time()
    job = _run(["sbatch", "--parsable", str(script)]).strip()
    answered = time.time()
    try:
        _wait_for(job)
    finally:
        _cancel(job)
    _, done, ran = log.read_text().rpartition("done ")
    if not done:
        raise Failed(f"plain job {job} has ended early; see {log}")
    return {"began": began, "answered": answered, "started": _born(log), "ran": float(ran)}


def shape_of_run(run_dir: Path) -> list[str]:
    """Return the `#SBATCH` lines that give the run's job its shape."""
    line = [*CLI, "submit", CONF, "--cluster", "testbed", "--time", "10m", "--dir", str(run_dir), "--dry-run"]
    text = _run([*line, *_overrides()])
    other = re.compile(rf"#SBATCH --({'|'.join(NOT_THE_SHAPE)})\b")
    return [line for line in text.splitlines() if line.startswith("#SBATCH") and not other.match(line)]


# --- files and Slurm ---------------------------------------------------------------------------------


def _overrides() -> list[str]:
    return [word for key, value in SETTINGS.items() for word in ("-o", f"{key}={value}")]


def _run(line: Sequence[str]) -> str:
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(line)} ended with code {done.returncode}:\n{done.stderr or done.stdout}")
    return done.stdout


def _wait_for(job: str) -> None:
    """Wait until a job has left the queue; asks seldom, and what is timed is on record."""
    deadline = time.monotonic() + DEADLINE_S
    while _queued(job):
        if time.monotonic() > deadline:
            raise Failed(f"job {job} has not ended after {DEADLINE_S:g} s")
        time.sleep(2.0)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _born(path: Path) -> float:
    """When a file was made: a batch step's log is, just before its script starts."""
    return float(_run(["stat", "--format=%.6W", str(path)]))


def _queued(job: str = "") -> list[str]:
    """Lines of the queue, of all jobs or of one."""
    only = [f"--jobs={job}"] if job else []
    done = subprocess.run(
        ["squeue", "--noheader", "--format=%i %j %u", *only], capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()  # of a job that Slurm has forgotten it says so on stderr


def _cancel(job: str) -> None:
    if _queued(job):
        subprocess.run(["scancel", job], check=False)


# --- the machine -------------------------------------------------------------------------------------


def _busy(seconds: float = 2.0) -> float:
    """Share of the machine's cores that is in use, looked at for a while."""

    def ticks() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return sum(fields[:8]), fields[3] + fields[4]

    total, idle = ticks()
    time.sleep(seconds)
    more, more_idle = ticks()
    return 1.0 - (more_idle - idle) / max(1, more - total)


def wait_until_idle(patience_s: float, *, load: bool) -> float:
    """Wait until nobody else uses cluster or cores, and return the share that is busy even so.

    Parameters
    ----------
    patience_s
        After this time it is measured although the cores are busy, which is printed; a queue that is not
        empty ends the benchmark.
    load
        Whether the load average counts, which remembers a minute: true before anything was started here.
    """
    deadline = time.monotonic() + patience_s
    while True:
        busy = _busy()
        if not _queued() and busy <= IDLE_BUSY and (not load or os.getloadavg()[0] <= IDLE_LOAD):
            return busy
        if time.monotonic() > deadline:
            if others := _queued():
                raise Failed(f"the cluster is in use: {'; '.join(others)}")
            return busy
        time.sleep(5.0)


# --- the table ---------------------------------------------------------------------------------------


def report(console: Console, runs: list[Moments], plain: list[Moments]) -> bool:
    """Print the table of medians; whether the goal is met."""
    names = ["began", *(name for name, _, _ in PARTS)]
    parts = {name: [run[name] - run[before] for run in runs] for before, name in pairwise(names)}
    ours = [sum(parts[name][i] for name, _, whose in PARTS if whose == OURS) for i in range(len(runs))]
    whole = [run["trained"] - run["began"] for run in runs]
    beside = {}
    before = "began"
    for name, like in PLAIN_PARTS:
        beside[like] = [job[name] - job[before] for job in plain]
        before = name
    plain_whole = [job["ran"] - job["began"] for job in plain]

    table = Table(title=f"seconds from the command to the first step, medians of {len(runs)}")
    for name in ("", "whose", "all", "median", "plain job"):
        table.add_column(name, justify="left" if name in ("", "whose") else "right")
    for name, title, whose in PARTS:
        peer = f"{median(beside[name]):.2f}" if name in beside else ""
        table.add_row(title, whose, _all(parts[name]), f"{median(parts[name]):.2f}", peer)
    table.add_section()
    table.add_row("whole", "", _all(whole), f"{median(whole):.2f}", f"{median(plain_whole):.2f}")
    table.add_row("of which hpc-rollart's own", OURS, _all(ours), f"{median(ours):.2f}", "")
    console.print(table)

    ranks = median([run["joined"] - run["began"] for run in runs])
    base = median(plain_whole)
    console.print(f"first step trained / plain job's hostnames: {median(whole) / base:.1f} x")
    console.print(f"all ranks in one MPI world / plain job's hostnames: {ranks / base:.1f} x")
    met = median(ours) < MAX_OURS_S
    console.print(
        f"{'pass' if met else 'FAIL'}: hpc-rollart's own share below {MAX_OURS_S:g} s: {median(ours):.1f} s"
    )
    return met


def _all(seconds: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in seconds)


def main() -> int:
    """Measure and print the table; 0 when the goal is met, 1 when not, 2 when there is no testbed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="submissions of each kind (default: 3)")
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds to wait for an idle cluster (default: 600)"
    )
    options = parser.parse_args()
    os.environ["SLURM_CONF"] = str(TESTBED / "etc" / "slurm.conf")
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True).returncode:
        print("no testbed here: python -m slurm.testbed up (as root; docs/testbed.md)", file=sys.stderr)
        return 2
    console = Console(width=110, highlight=False)
    folder = TESTBED / "shared" / f"submission-{os.getpid()}"
    runs: list[Moments] = []
    plain: list[Moments] = []
    try:
        _run([*CLI, "model", "build", CONF, *_overrides()])
        shape = shape_of_run(folder / "run-0")
        for i in range(options.repeats):
            for kind in ("plain", "run"):
                busy = wait_until_idle(options.patience, load=not (runs or plain))
                load, cores = os.getloadavg()[0], os.cpu_count()
                console.print(f"{kind} {i + 1}: {cores} cores, {busy:.0%} busy before it, load {load:.1f}")
                if kind == "plain":
                    plain.append(time_plain(folder / f"plain-{i}", shape))
                else:
                    runs.append(time_run(folder / f"run-{i}"))
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    met = report(console, runs, plain)
    shutil.rmtree(folder)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
