"""Goes on with a run from its directory: ``python -m tests.end_to_end.resuming RUN``."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from hpc_rollart.config.load import load_resolved
from hpc_rollart.launch.attempt import next_attempt
from hpc_rollart.launch.local import run_world
from hpc_rollart.launch.rundir import RunDir
from tests.end_to_end.conftest import ROOT, Run


def start_again(path: Path) -> "subprocess.Popen[str]":
    """Start the next attempt of the run in `path` as a process of its own."""
    command = [sys.executable, "-m", "tests.end_to_end.resuming", str(path)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def complete_again(path: Path, timeout: float = 200) -> Run:
    """Run the next attempt to its end."""
    process = start_again(path)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    return Run(path, process.returncode, output)


def main(path: Path) -> int:
    """Run the next attempt; 0 when the run is done, 130 when it was interrupted."""
    config = load_resolved(path)
    run = RunDir(path, json.loads((path / "manifest.json").read_text())["run_id"])
    outcome = run_world(config, run, lambda _: None, attempt=next_attempt(path, config))
    print(outcome)
    return {"done": 0, "interrupted": 130, "failed": 3}[outcome.state]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
