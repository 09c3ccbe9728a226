"""What one node of a job says of itself, as JSON on stdout; a standard-library program.

Run on the node as ``python -m hpc_rollart.launch.nodecheck RUN_DIR SCRATCH [--see PATH] [--ask-gpus]
[PACKAGE...]``.
"""

import argparse
import fcntl
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_rollart.launch.agent import GPU_VARIABLES

# Without its persistence daemon the driver loads anew for each call, which takes seconds.
_GPU_DEADLINE_S = 15.0


def facts(
    run_dir: Path,
    scratch: Path,
    packages: Sequence[str] = (),
    *,
    see: Path | None = None,
    ask_gpus: bool = False,
) -> dict[str, Any]:
    """Return what this node sees; whatever it could not find out is an error's text.

    Parameters
    ----------
    see
        File or directory that this node has to see.
    ask_gpus
        Whether to ask the driver for the names of the GPUs, which may take seconds.

    Returns
    -------
    dict
        `host`; `t` (Unix seconds); `cpus` (that this process may use); `gpus` (by variable);
        `run_dir`, `scratch`, `memory`, `lock`, `scratch_lock` and `see` (empty if fine, else what is wrong);
        `free_run_dir`, `free_scratch`, `free_memory` (bytes); `interfaces`; `gpu_names` (null if not asked
        or not known); `hdf5_locking` (the variable, null if it is not set); `python`; `packages` (version by
        name, null if it is missing).
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
        "scratch_lock": _lockable(scratch),
        "see": "" if see is None or see.exists() else f"{see}: No such file or directory",
        "free_run_dir": _free(run_dir),
        "free_scratch": _free(scratch),
        "free_memory": _free(Path("/dev/shm")),
        "interfaces": _interfaces(),
        "gpu_names": _gpu_names() if ask_gpus else None,
        "hdf5_locking": os.environ.get("HDF5_USE_FILE_LOCKING"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": versions(packages),
    }


def missing_interface(wanted: str, there: Sequence[str]) -> str:
    """Return that a node has not the network interface it is to use, or nothing.

    Parameters
    ----------
    wanted
        A name, or several with commas between, of which MPI uses those that a node has; empty: any.
    there
        The node's `interfaces`; empty where they could not be listed, and then nothing is missed.
    """
    if not wanted or not there or set(wanted.split(",")) & set(there):
        return ""
    others = ", ".join(name for name in there if name != "lo")
    return f"no interface {wanted}; there are {others or 'none'}"


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the installed version of each distribution, None for one that is missing."""
    return {name: _version(name) for name in packages}


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


def _interfaces() -> list[str]:
    try:
        return sorted(name for _, name in socket.if_nameindex())
    except OSError:
        return []


def _gpu_names() -> list[str] | None:
    """Return the names of this node's GPUs as NVIDIA's driver has them; None where it cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        return None
    line = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_GPU_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [name.strip() for name in done.stdout.splitlines() if name.strip()]


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--see", type=Path)
    parser.add_argument("--ask-gpus", action="store_true")
    parser.add_argument("packages", nargs="*")
    given = parser.parse_intermixed_args()
    found = facts(given.run_dir, given.scratch, given.packages, see=given.see, ask_gpus=given.ask_gpus)
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
