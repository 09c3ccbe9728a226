"""Starts MPI's daemon on one node through srun, in the place of ssh.

mpirun calls it as ``AGENT HOST COMMAND...``; what it must know of the job is in the file that the variable
ROLLART_NODES names. A standard-library program: mpirun starts one for each node.
"""

import json
import os
import sys
from pathlib import Path

NODES_VARIABLE = "ROLLART_NODES"
# Where the cluster is and who one is there; all else that Slurm puts there is about one job or step.
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
# What shows GPUs to a process. srun would pass on those of this node; the step gets its own from Slurm.
GPU_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)  # fmt: skip


def step_command(job_id: str, group: int, host: str, cpus: int, name: str) -> list[str]:
    """Return the srun command that runs something once on `host` with all that the component has there.

    Parameters
    ----------
    job_id, group
        The job, and the het group in it, or -1 in a job that is not heterogeneous.
    cpus
        Cores of the component on the node; since Slurm 22.05 srun no longer takes them from the job.
    name
        What squeue calls the step.
    """
    line = ["srun", f"--jobid={job_id}", f"--job-name={name}"]
    if group >= 0:
        line.append(f"--het-group={group}")
    line += [f"--nodelist={host}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}"]
    # overlap: the step shares what the job has with every other step; without it, it waits for ever.
    line += ["--overlap", "--mem=0", "--mpi=none", "--export=ALL", "--quiet"]
    return line


def step_environment(base: dict[str, str], job_id: str) -> dict[str, str]:
    """Return the environment for srun: not this node's GPUs, and nothing that Slurm set for this process."""
    keep = {
        name: value
        for name, value in base.items()
        if name not in GPU_VARIABLES and (name in KEPT or not name.startswith("SLURM_"))
    }
    return keep | {"SLURM_JOB_ID": job_id}


def main(argv: list[str]) -> None:
    """Become the srun that runs the command on the node."""
    host, command = argv[0], argv[1:]
    nodes = json.loads(Path(os.environ[NODES_VARIABLE]).read_text(encoding="utf-8"))
    try:
        place = nodes["hosts"][host]
    except KeyError:
        sys.exit(f"{host} is no node of job {nodes['job_id']}")
    line = step_command(nodes["job_id"], place["group"], host, place["cpus"], nodes["name"])
    line += [*nodes["python"], "-m", "hpc_rollart.launch.node"]
    line += [nodes["scratch"], nodes["name"], *command]
    environment = step_environment(dict(os.environ), nodes["job_id"])
    os.execvpe(line[0], line, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
