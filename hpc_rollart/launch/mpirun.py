"""The mpirun command and environment that start one MPI world on this machine."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpc_rollart.config.layout import blocks
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import UserError
from hpc_rollart.launch.processes import MARKER

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# A run started inside a Slurm allocation or from another MPI program is still a world of its own.
_FOREIGN_PREFIXES = ("SLURM_", "PMIX_", "PMI_", "PRTE_", "OMPI_")


class LaunchError(UserError):
    """The ranks cannot be started here; the message says what is missing and the mend."""


def find_mpirun() -> Path:
    """Return the mpirun of this Python's environment; raises `LaunchError` when there is none.

    One from elsewhere would be another MPI than the one mpi4py loads, and each rank a world of its own.
    """
    path = Path(sys.executable).with_name("mpirun")
    if not path.is_file():
        raise LaunchError(
            f"there is no mpirun beside {sys.executable}: install the run's parts with "
            f"pip install 'hpc-rollart[cpu]', or run make venv"
        )
    return path


def command(config: RunConfig, mpirun: Path, rank_command: list[str]) -> list[str]:
    """Return the command line: one app context for each component, in rank order."""
    # ulfm: the survivors of a lost rank are told, instead of everything being killed at once.
    # bind-to none: else Open MPI gives two ranks one core each, whatever cpus_per_rank says.
    line = [str(mpirun), "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none"]
    for index, block in enumerate(blocks(config)):
        line += [":"] if index else []
        line += ["-n", str(block.count), "-x", f"ROLLART_COMPONENT={block.component}"]
        for name in _THREAD_VARIABLES:
            line += ["-x", f"{name}={block.cpus_per_rank}"]
        line += rank_command
    return line


def environment(base: Mapping[str, str], run_id: str, scratch: Path, shared_memory: Path) -> dict[str, str]:
    """Return the environment of mpirun and of every rank.

    Parameters
    ----------
    base
        Environment to start from, usually `os.environ`.
    run_id
        Marks every process of the run.
    scratch
        Short node-local directory for sockets and temporary files; removed after the run.
    shared_memory
        Directory in memory for MPI's shared segments; removed after the run.
    """
    env = {name: value for name, value in base.items() if not name.startswith(_FOREIGN_PREFIXES)}
    env.setdefault("HOME", str(scratch))  # Open MPI does not start without one
    env |= {
        MARKER: run_id,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(scratch),
        "PRTE_MCA_prte_tmpdir_base": str(scratch),
        "OMPI_MCA_btl_sm_backing_directory": str(shared_memory),
        # Ranks of one machine talk through shared memory: no rank listens on the network.
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_pml": "ob1",
        # Ranks poll and sleep by themselves; a poll that yields the core each time costs milliseconds on
        # a busy machine.
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "TQDM_DISABLE": "1",
        "PMIX_MCA_ptl_base_if_include": "lo",
    }
    if os.geteuid() == 0:
        for kind in ("OMPI", "PRTE"):
            env[f"{kind}_ALLOW_RUN_AS_ROOT"] = env[f"{kind}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return env
