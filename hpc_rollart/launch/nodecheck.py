"""What one node of a job says of itself, as JSON on stdout; a standard-library program.

Run on the node as ``python -m hpc_rollart.launch.nodecheck RUN_DIR SCRATCH [PACKAGE...]``.
"""

import fcntl
import importlib.metadata
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from hpc_rollart.launch.agent import GPU_VARIABLES


def facts(run_dir: Path, scratch: Path, packages: list[str]) -> dict[str, Any]:
    """Return what this node sees; whatever it could not find out is an error's text.

    Returns
    -------
    dict
        `host`; `t` (Unix seconds); `cpus` (that this process may use); `gpus` (by variable);
        `run_dir`, `scratch`, `memory` and `lock` (empty if fine, else what is wrong); `free_run_dir`,
        `free_scratch`, `free_memory` (bytes); `python`; `packages` (version by name, null if it is missing).
    """
    return {
        "host": os.uname().nodename,
        "t": time.time(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ},
        "run_dir": _usable(run_dir),
        "scratch": _usable(scratch),
        "memory": _usable(Path("/dev/shm")),
        "lock": _lockable(run_dir),
        "free_run_dir": _free(run_dir),
        "free_scratch": _free(scratch),
        "free_memory": _free(Path("/dev/shm")),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: _version(name) for name in packages},
    }


def _usable(folder: Path) -> str:
    """Return what keeps this node from making and removing a file in a folder, or nothing."""
    probe = folder / f".probe-{os.uname().nodename}-{os.getpid()}"
    try:
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def _lockable(folder: Path) -> str:
    """Return what keeps HDF5 from locking a file there, or nothing."""
    probe = folder / f".lock-{os.uname().nodename}-{os.getpid()}"
    try:
        with open(probe, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        probe.unlink()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(facts(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))
