"""Which GPUs a rank sees: its own part of what Slurm gave its component on its node, or none."""

from collections.abc import Mapping, MutableMapping

from hpc_rollart.config.layout import Block
from hpc_rollart.config.schema import Component
from hpc_rollart.errors import RunFailed
from hpc_rollart.launch.agent import GPU_VARIABLES

GPU_VENDOR = "ROLLART_GPU_VENDOR"
"""Set on the ranks of a Slurm job: whose GPUs the cluster has."""

_VARIABLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "ROCR_VISIBLE_DEVICES"}


def slurm_gpus(environ: Mapping[str, str], vendor: str = "nvidia") -> list[str]:
    """Return the GPUs that Slurm shows to a process, in its words (indices or ids)."""
    text = environ.get(_VARIABLE[vendor]) or environ.get("CUDA_VISIBLE_DEVICES") or ""
    return [part for part in text.split(",") if part]


def show_own_gpus(
    environ: MutableMapping[str, str], part: Component, block: Block, rank: int, vendor: str
) -> list[str]:
    """Let this process see its own GPUs only; before anything that uses GPUs is imported.

    The ranks of a component on a node share what Slurm gave the component there, in rank order. One variable
    is set and its rivals are removed, as libraries disagree about which of several counts.

    Parameters
    ----------
    environ
        Changed in place, usually `os.environ`.
    part, block, rank
        This rank's component and place.
    vendor
        `nvidia` or `amd`.

    Returns
    -------
    list of str
        What it sees now.

    Raises
    ------
    RunFailed
        Slurm gave the node fewer GPUs than its ranks need.
    """
    each = getattr(part, "gpus_per_rank", 0)
    local = (rank - block.first) % part.ranks_per_node
    given = slurm_gpus(environ, vendor)
    for name in GPU_VARIABLES:
        environ.pop(name, None)
    mine = given[local * each : (local + 1) * each]
    environ[_VARIABLE[vendor]] = ",".join(mine)  # empty: none
    if len(mine) < each:
        raise RunFailed(
            f"needs {each} GPUs (components.{block.component}.gpus_per_rank), but this node's "
            f"{part.ranks_per_node} ranks share {len(given)}: {', '.join(given) or 'none'}"
        )
    return mine
