"""What Slurm gave this job: which nodes for which component, until when."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import commands


class AllocationError(UserError):
    """The job is not what the config needs; the message says what differs and the mend."""


@dataclass(frozen=True)
class Group:
    """The nodes of one component: one het group of the job.

    Attributes
    ----------
    index
        Number of the het group; -1 in a job that is not heterogeneous.
    job_id
        Slurm's id of this part of the job.
    hosts
        Node names in Slurm's order.
    """

    component: str
    index: int
    hosts: tuple[str, ...]
    job_id: str = ""


@dataclass(frozen=True)
class Allocation:
    """The job that this process runs in.

    Attributes
    ----------
    job_id
        Of the het job's leader, which stands for the whole.
    groups
        One for each component, in rank order.
    restarts
        How often the job was requeued before.
    """

    job_id: str
    groups: tuple[Group, ...]
    restarts: int = 0

    @classmethod
    def of_this_job(cls, config: RunConfig, environ: Mapping[str, str] = os.environ) -> "Allocation":
        """Read it from the batch step's environment.

        Raises
        ------
        AllocationError
            This is no Slurm job, or one with other components or nodes than the config's.
        """
        job_id = environ.get("SLURM_JOB_ID", "")
        if not job_id:
            raise AllocationError("this is no Slurm job (SLURM_JOB_ID is not set); use hpc-rollart submit")
        size = int(environ.get("SLURM_HET_SIZE", "0"))
        names = list(config.components)
        if max(1, size) != len(names):
            raise AllocationError(
                f"job {job_id} has {max(1, size)} components, the config has {len(names)} "
                f"({', '.join(names)}); submit it with hpc-rollart submit"
            )
        groups = []
        for index, name in enumerate(names):
            variable = f"SLURM_JOB_NODELIST_HET_GROUP_{index}" if size else "SLURM_JOB_NODELIST"
            hosts = expand(environ.get(variable, ""))
            wanted = config.components[name].nodes
            if len(hosts) != wanted:
                raise AllocationError(
                    f"component {name}: job {job_id} has {len(hosts)} nodes for it, the config needs {wanted}"
                )
            part = environ.get(f"SLURM_JOB_ID_HET_GROUP_{index}", job_id)
            groups.append(Group(name, index if size else -1, hosts, part))
        return cls(job_id, tuple(groups), int(environ.get("SLURM_RESTART_COUNT", "0")))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every node once, in rank order."""
        return tuple(dict.fromkeys(host for group in self.groups for host in group.hosts))

    def shared_hosts(self) -> dict[str, list[str]]:
        """Return the nodes that several components were put on, with the components' names."""
        found: dict[str, list[str]] = {}
        for group in self.groups:
            for host in group.hosts:
                found.setdefault(host, []).append(group.component)
        return {host: names for host, names in found.items() if len(names) > 1}

    def only(self, hosts: Sequence[str]) -> "Allocation":
        """Return the allocation reduced to some nodes."""
        return self.without([host for host in self.hosts if host not in hosts])

    def without(self, lost: Sequence[str]) -> "Allocation":
        """Return the allocation as it is when some nodes are gone."""
        groups = [
            replace(group, hosts=tuple(host for host in group.hosts if host not in lost))
            for group in self.groups
        ]
        return replace(self, groups=tuple(groups))


def expand(nodelist: str) -> tuple[str, ...]:
    """Return the names behind Slurm's short form such as ``h20-[1-2]``, as Slurm itself reads it."""
    return tuple(commands.run(["scontrol", "show", "hostnames", nodelist]).split()) if nodelist else ()


@dataclass(frozen=True)
class JobFacts:
    """What the controller says of a job right now.

    Attributes
    ----------
    state
        Slurm's word, such as RUNNING; empty if it does not know the job.
    end_time
        Unix seconds at which Slurm ends the job, limits raised meanwhile included; None without a limit.
    """

    state: str
    end_time: float | None


def job_facts(job_id: str) -> JobFacts:
    """Ask the controller about a job; of a het job about its leader."""
    text = commands.run(["scontrol", "--oneliner", "show", "job", job_id]).splitlines()
    found = dict(re.findall(r"(\w+)=(\S*)", text[0])) if text else {}
    end = found.get("EndTime", "")
    try:
        end_time = datetime.fromisoformat(end).timestamp()
    except ValueError:  # Unknown: there is no limit
        end_time = None
    return JobFacts(found.get("JobState", ""), end_time)


def in_slurms_order(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return nodes as Slurm sorts them, which is not by letters: h20-1 comes before h100-1."""
    text = commands.run(["scontrol", "show", "hostlistsorted", ",".join(hosts)])
    return expand(text.strip())


def give_back(group: Group, left: Sequence[str], folder: Path) -> None:
    """Give the nodes of a component that are not in `left` back to Slurm; the job goes on without them.

    Slurm ends a het job whose first component has one node when any of its nodes goes down, whatever
    --no-kill says (seen with 22.05: the first component is requeued alone and the others fail). It cannot
    when the node is no longer the job's.

    Raises
    ------
    SlurmError
        The site does not let jobs shrink.
    """
    # scontrol writes scripts for interactive shells into the current directory; they belong to the run's.
    command = ["scontrol", "update", f"JobId={group.job_id}", f"NodeList={','.join(left)}"]
    commands.run(command, cwd=folder)


def slurm_version() -> tuple[int, int]:
    """Return the release of the Slurm here, such as (22, 5)."""
    found = re.search(r"(\d+)\.(\d+)", commands.run(["srun", "--version"]))
    return (int(found[1]), int(found[2])) if found else (0, 0)
