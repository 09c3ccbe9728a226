"""Runs Slurm's commands: with a deadline, a clean environment, and errors in its own words plus the mend."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hpc_rollart.errors import UserError
from hpc_rollart.launch.agent import KEPT

DEADLINE_S = 45.0

# What a job, a step or an MPI program leaves in the environment of whoever is started in it. Passed on, it
# pins ranks to another job's cores, opens another job's files or filters what squeue shows.
_FOREIGN = (
    "SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "PMIX_", "PMI_", "PRTE_",
    "OMPI_", "SUBMITIT_",
)  # fmt: skip

# Slurm's words, in lower case, and what to do. The first that fits is taken.
_MENDS = (
    ("invalid account", "give an account of yours with --account; sacctmgr show associations lists them"),
    ("invalid qos", "give a QOS that the account may use with --qos; sacctmgr show associations lists them"),
    ("invalid partition", "set the profile's partitions.NAME.partition to one that sinfo lists"),
    ("no partition specified", "set the profile's partitions.NAME.partition to one that sinfo lists"),
    ("required partition not available", "the partition is down: wait, or choose another with -c"),
    ("partition is down", "the partition is down: wait, or choose another with -c"),
    ("node count specification", "ask for fewer nodes: components.NAME.nodes"),
    ("more processors requested than permitted", "ask for fewer nodes, ranks_per_node or cpus_per_rank"),
    ("time limit", "ask for less time with --time; sinfo lists each partition's limit"),
    ("invalid generic resource", "the cluster has no such GPUs: compare the profile with sinfo -o '%P %G'"),
    ("invalid gres", "the cluster has no such GPUs: compare the profile with sinfo -o '%P %G'"),
    ("memory specification", "ask for less memory: the profile's partitions.NAME.memory"),
    ("invalid feature", "the partition has no such nodes: the profile's constraint, and sinfo -o '%P %f'"),
    ("reservation", "correct the profile's reservation, or clear it with -c reservation=null"),
    (
        "requested node configuration is not available",
        "no node has what the components ask for: compare their nodes, ranks_per_node, cpus_per_rank "
        "and gpus_per_rank with sinfo -o '%P %D %c %m %G'",
    ),
    ("qosmax", "the QOS allows less: fewer nodes, less time, or another --qos"),
    ("violates accounting", "the account or QOS allows less: fewer nodes, less time, or wait for other jobs"),
    ("configuration source", "no cluster is set up here: run this on its login node, or set SLURM_CONF"),
    ("unable to contact slurm controller", "Slurm's controller does not answer: try again in a while"),
    ("socket timed out", "Slurm's controller is busy: look at squeue before trying again"),
)  # fmt: skip


class SlurmError(UserError):
    """A command of Slurm's was refused or did not answer; the message has its words and the mend.

    Attributes
    ----------
    said
        What the command itself wrote.
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class CommandTimeout(SlurmError):
    """A command had not answered by the deadline; what it was to do may be done all the same."""


class CommandMissing(SlurmError):
    """There is no such command here, so this is no machine of the cluster."""


class Runner(Protocol):
    """Runs one command and returns what it wrote to its standard output."""

    def __call__(self, command: Sequence[str]) -> str: ...


def clean_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what an outer job, step or MPI program left in it."""
    return {name: value for name, value in base.items() if name in KEPT or not name.startswith(_FOREIGN)}


def run(command: Sequence[str], deadline_s: float = DEADLINE_S, cwd: Path | None = None) -> str:
    """Run one of Slurm's commands and return its standard output.

    Raises
    ------
    CommandMissing
        There is no such program.
    CommandTimeout
        It had not answered by the deadline.
    SlurmError
        It refused.
    """
    name = command[0]
    conf = os.environ.get("SLURM_CONF")
    if conf and not Path(conf).is_file():  # Slurm itself would try for a minute
        raise SlurmError(f"{name}: SLURM_CONF names {conf}, which is no file here; correct or unset it")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            cwd=cwd,
            # Slurm's answers are read by programs here: no translation, and times in one form.
            env=clean_environment(os.environ) | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"},
            check=False,
        )
    except FileNotFoundError:
        raise CommandMissing(f"no {name} here: run this on a login node of the cluster") from None
    except OSError as error:
        raise CommandMissing(f"{name} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CommandTimeout(
            f"{name} has not answered within {deadline_s:g} s: Slurm's controller is down or busy; try again"
        ) from None
    if done.returncode:
        said = "\n".join(filter(None, (done.stderr.strip(), done.stdout.strip())))
        raise SlurmError(explain(name, said, done.returncode), said)
    return done.stdout


def explain(name: str, said: str, code: int = 1) -> str:
    """Return Slurm's words as one text with the mend, if there is a known one."""
    lines = [line.removeprefix(f"{name}: ").removeprefix("error: ").strip() for line in said.splitlines()]
    words = "; ".join(dict.fromkeys(line for line in lines if line)) or f"exit code {code}"
    mend = next((mend for key, mend in _MENDS if key in words.lower()), "")
    return f"{name}: {words}" + (f"\n{mend}" if mend else "")
