"""The mpirun command and environment that start one MPI world, here on one machine."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_rollart.config.layout import blocks
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import LaunchError
from hpc_rollart.jobs.commands import clean_environment
from hpc_rollart.launch.processes import MARKER

COMPONENT = "ROLLART_COMPONENT"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


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


class LocalLauncher:
    """Starts the ranks of a world on this machine."""

    scratch = Path("/tmp")

    def __init__(self) -> None:
        self._mpirun = find_mpirun()

    def command(self, config: RunConfig, rank_command: list[str]) -> list[str]:
        """Return the command line of mpirun."""
        return command(config, self._mpirun, rank_command)

    def environment(self, run_id: str, scratch: Path, shared_memory: Path) -> dict[str, str]:
        """Return the environment of mpirun and of every rank, for one machine."""
        return environment(os.environ, run_id, scratch, shared_memory) | {
            # Ranks of one machine talk through shared memory: no rank listens on the network.
            "OMPI_MCA_btl": "self,sm"
        }

    def started(self, pid: int) -> None:
        """Nothing is to be done."""

    def end(self) -> None:
        """Nothing runs elsewhere."""


def command(
    config: RunConfig, mpirun: Path, rank_command: list[str], hosts: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Return the command line: one app context for each component, in rank order.

    Parameters
    ----------
    hosts
        Nodes of each component, for a world that is not on this machine alone.
    """
    # ulfm: the survivors of a lost rank are told, instead of everything being killed at once.
    # bind-to none: else Open MPI gives two ranks one core each, whatever cpus_per_rank says.
    line = [str(mpirun), "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none"]
    for index, block in enumerate(blocks(config)):
        line += [":"] if index else []
        line += ["-n", str(block.count), "-x", f"{COMPONENT}={block.component}"]
        if hosts is not None:
            each = config.components[block.component].ranks_per_node
            line += ["--host", ",".join(f"{host}:{each}" for host in hosts[block.component])]
        for name in THREAD_VARIABLES:
            line += ["-x", f"{name}={block.cpus_per_rank}"]
        line += rank_command
    return line


def scratch_variables(scratch: Path, shared_memory: Path) -> dict[str, str]:
    """Return the variables that name the node-local directories of a run.

    Compilers' caches are in scratch: on a shared file system several nodes write them at once.
    """
    return {
        "TMPDIR": str(scratch),
        "PRTE_MCA_prte_tmpdir_base": str(scratch),
        "OMPI_MCA_btl_sm_backing_directory": str(shared_memory),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "CUDA_CACHE_PATH": str(scratch / "cuda"),
        "HF_MODULES_CACHE": str(scratch / "hf-modules"),
    }


def environment(base: Mapping[str, str], run_id: str, scratch: Path, shared_memory: Path) -> dict[str, str]:
    """Return what the environments of mpirun and of every rank have in common wherever they run.

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
    env = clean_environment(base)
    env.setdefault("HOME", str(scratch))  # Open MPI does not start without one
    env |= {
        MARKER: run_id,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **scratch_variables(scratch, shared_memory),
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
