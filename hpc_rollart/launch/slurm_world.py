"""How the ranks of a world are started inside a Slurm job: mpirun with srun as its agent, or srun alone."""

import abc
import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rollart.config.cluster import Cluster, interface_of, python_of
from hpc_rollart.config.layout import blocks
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import LaunchError
from hpc_rollart.jobs import commands
from hpc_rollart.jobs.commands import SlurmError
from hpc_rollart.jobs.queue import POLL_S
from hpc_rollart.launch import agent, mpirun, scratch, shield
from hpc_rollart.launch.allocation import Allocation, in_slurms_order, slurm_version
from hpc_rollart.launch.attempt import Attempt, logs
from hpc_rollart.launch.gpus import GPU_VENDOR
from hpc_rollart.launch.rundir import RunDir, write_json

# In older ones Slurm's PMIx plugin numbers nodes by name, but ranks by component. 22.05 was seen to fail and
# 24.11 to work; what is between is refused until somebody has seen it work.
_PMIX_ANY_ORDER = (24, 11)
_SHIELD_S = 30.0
# Daemons end with mpirun and clear their nodes' scratch; those still there at the second look are ended.
_END_LOOKS = 3


class SlurmLauncher(abc.ABC):
    """Common to both ways of starting ranks in a job.

    Parameters
    ----------
    config
        Effective config of the attempt.
    cluster, allocation
        The profile, and the nodes that are left of the job.
    run, attempt
        Which start of which run.
    """

    def __init__(
        self, config: RunConfig, cluster: Cluster, allocation: Allocation, run: RunDir, attempt: Attempt
    ) -> None:
        self.scratch = scratch_base(cluster)
        self._config, self._cluster, self._allocation = config, cluster, allocation
        self._run, self._attempt = run, attempt
        self._name = scratch.name_for(run.run_id, attempt.number)

    @abc.abstractmethod
    def command(self, config: RunConfig, rank_command: list[str]) -> list[str]:
        """Return the command line that starts all ranks."""

    def environment(self, run_id: str, scratch: Path, shared_memory: Path) -> dict[str, str]:
        """Return the environment of the starting command and, through it, of every rank."""
        env = mpirun.environment(os.environ, run_id, scratch, shared_memory)
        for name in agent.GPU_VARIABLES:
            if name in os.environ:  # ranks on this node are given theirs by `rank.py`
                env[name] = os.environ[name]
        env["OMPI_MCA_btl"] = "self,sm,tcp"
        env[GPU_VENDOR] = self._cluster.gpu_vendor
        for variable, value in _interfaces(self._interface()).items():
            env.setdefault(variable, value)
        return env | self._cluster.environment

    @abc.abstractmethod
    def started(self, pid: int) -> None:
        """Do what is to be done once the command runs."""

    def end(self) -> None:
        """End the steps of this world that are still there, and wait until they are gone."""
        for look in range(_END_LOOKS):
            left = steps(self._allocation.job_id, self._name)
            if left == []:
                return
            if look and left:
                with contextlib.suppress(SlurmError):
                    commands.run(["scancel", "--signal=KILL", *left])
            time.sleep(POLL_S)
        print(f"steps {', '.join(left or ['?'])} do not end; Slurm ends them with the job", flush=True)

    def _interface(self) -> str | None:
        names = {interface_of(self._cluster, part) for part in self._config.components.values()}
        # MPI takes a list of interfaces and uses those that a node has.
        return ",".join(sorted(name for name in names if name)) or None

    def _rank_command(self, rank_command: list[str]) -> list[str]:
        """Return the command of a rank, which may have to run inside a container."""
        container = self._cluster.container
        if container is None:
            return [*self._python()[:1], *rank_command[1:]]
        binds = [str(self._run.path), str(self.scratch), "/dev/shm", *container.binds]
        line = [container.runtime, "exec"]
        line += [] if container.gpu == "none" else [f"--{container.gpu}"]
        line += [f"--bind={bind}" for bind in binds]
        return [*line, container.image, container.python, *rank_command[1:]]

    def _python(self) -> list[str]:
        return [python_of(self._cluster)]

    def _cpus(self, component: str) -> int:
        part = self._config.components[component]
        return part.cpus_per_rank * part.ranks_per_node


class MpirunLauncher(SlurmLauncher):
    """Open MPI's mpirun here, its daemons on the other nodes through srun; see `agent.py`."""

    def command(self, config: RunConfig, rank_command: list[str]) -> list[str]:
        """Return the command line of mpirun; writes the files that it and its agent read."""
        if shared := self._allocation.shared_hosts():
            host, names = next(iter(shared.items()))
            raise LaunchError(
                f"node {host} was given to components {' and '.join(names)} both, and mpirun can use it for "
                "one only: ask for whole nodes (`whole_nodes: true` in the cluster profile's partition)"
            )
        folder = logs(self._run.path, self._attempt.number)
        hosts = {group.component: group.hosts for group in self._allocation.groups}
        lines = []
        places: dict[str, Any] = {}
        for group in self._allocation.groups:
            for host in group.hosts:
                lines.append(f"{host} slots={config.components[group.component].ranks_per_node}\n")
                places[host] = {"group": group.index, "cpus": self._cpus(group.component)}
        (folder / "hostfile").write_text("".join(lines), encoding="utf-8")
        nodes = {
            "job_id": self._allocation.job_id,
            "python": self._python(),
            "scratch": str(self.scratch),
            "name": self._name,
            "hosts": places,
        }
        write_json(self._nodes_file, nodes)
        line = mpirun.command(config, mpirun.find_mpirun(), self._rank_command(rank_command), hosts)
        # leave-session-attached: else each daemon forks, and its first process dies of signals.
        return [line[0], "--leave-session-attached", "--hostfile", str(folder / "hostfile"), *line[1:]]

    def environment(self, run_id: str, scratch: Path, shared_memory: Path) -> dict[str, str]:
        """Add what makes mpirun start its daemons with the agent."""
        env = super().environment(run_id, scratch, shared_memory)
        python = self._python()[0]
        if any(character.isspace() for character in python):
            raise LaunchError(f"mpirun's agent cannot be started by {python!r}: its path has a blank in it")
        return env | {
            agent.NODES_VARIABLE: str(self._nodes_file),
            "PRTE_MCA_plm": "ssh",
            "PRTE_MCA_plm_ssh_agent": f"{python} -m hpc_rollart.launch.agent",
            # The agent needs Slurm's commands and the job's files, which only this node is sure to have.
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            # mpirun would read Slurm's variables itself, and see the first component's nodes only.
            "PRTE_MCA_ras": "^slurm",
        }

    def started(self, pid: int) -> None:
        """Shield mpirun from the SIGTERM that Slurm sends to the whole batch step; see `shield.py`.

        The supervisor, which gets it too, has the ranks stop in good order.
        """
        blocked = (signal.SIGTERM, signal.SIGINT)
        threading.Thread(
            target=shield.block_when_handled, args=(pid, blocked, _SHIELD_S), name="shield", daemon=True
        ).start()

    @property
    def _nodes_file(self) -> Path:
        return logs(self._run.path, self._attempt.number) / "nodes.json"


class SrunLauncher(SlurmLauncher):
    """``srun --mpi=pmix`` over all het groups, where the site's own MPI must be used."""

    def command(self, config: RunConfig, rank_command: list[str]) -> list[str]:
        """Return the command line of srun.

        Raises
        ------
        LaunchError
            This Slurm would hang or abort with the nodes that the job has.
        """
        hosts = [host for group in self._allocation.groups for host in group.hosts]
        refuse_node_order(hosts, in_slurms_order(hosts), slurm_version())
        line = ["srun"]
        for index, (block, group) in enumerate(zip(blocks(config), self._allocation.groups, strict=True)):
            part = config.components[block.component]
            line += [":"] if index else []
            line += [f"--het-group={group.index}"] if group.index >= 0 else []
            line += [
                f"--job-name={self._name}",
                f"--mpi={self._cluster.pmix}",
                f"--nodelist={','.join(group.hosts)}",
                f"--nodes={len(group.hosts)}",
                f"--ntasks={block.count}",
                f"--ntasks-per-node={part.ranks_per_node}",
                f"--cpus-per-task={block.cpus_per_rank}",
                "--distribution=block",
                "--overlap",
                "--mem=0",
                "--kill-on-bad-exit=1",
                "--export=" + ",".join(["ALL", f"{mpirun.COMPONENT}={block.component}", *_threads(block)]),
            ]
            line += self._rank_command(rank_command)
        return line

    def started(self, pid: int) -> None:
        """Nothing is to be done."""

    def environment(self, run_id: str, scratch: Path, shared_memory: Path) -> dict[str, str]:
        """Add what srun must know of the job."""
        env = super().environment(run_id, scratch, shared_memory)
        het = {"SLURM_HET_SIZE": str(len(self._allocation.groups))} if self._is_het else {}
        return agent.step_environment(env, self._allocation.job_id) | het

    @property
    def _is_het(self) -> bool:
        return self._allocation.groups[0].index >= 0


def _threads(block: Any) -> list[str]:
    return [f"{name}={block.cpus_per_rank}" for name in mpirun.THREAD_VARIABLES]


def make_launcher(
    config: RunConfig, cluster: Cluster, allocation: Allocation, run: RunDir, attempt: Attempt
) -> SlurmLauncher:
    """Return the launcher that the profile, or else the run's config, asks for."""
    kind = MpirunLauncher if (cluster.launcher or config.launch.launcher) == "mpirun" else SrunLauncher
    return kind(config, cluster, allocation, run, attempt)


def refuse_node_order(hosts: Sequence[str], in_order: Sequence[str], version: tuple[int, int]) -> None:
    """Refuse srun where Slurm's PMIx plugin would fail because of the nodes' names.

    Parameters
    ----------
    hosts, in_order
        The nodes by component, and as Slurm sorts them.
    version
        Of Slurm.

    Raises
    ------
    LaunchError
        Slurm is too old, and the nodes, in the order of the components, are not sorted by name.
    """
    if version >= _PMIX_ANY_ORDER or list(hosts) == list(in_order):
        return
    release = ".".join(f"{part:02d}" for part in version)
    raise LaunchError(
        f"launcher srun cannot start this world: Slurm {release} confuses the ranks when the nodes of the "
        f"components are not in its own order of names; they are {', '.join(hosts)}, and its order is "
        f"{', '.join(in_order)}; use launch.launcher: mpirun, or a Slurm of 24.11 or newer"
    )


def scratch_base(cluster: Cluster) -> Path:
    """Return the node-local directory of the profile, its variable filled in.

    Raises
    ------
    LaunchError
        The variable is not set here, or what it names is no directory.
    """
    name, _, rest = cluster.scratch.partition("/")
    text = cluster.scratch
    if name.startswith("$"):
        if not (value := os.environ.get(name[1:])):
            raise LaunchError(
                f"scratch: {name} is not set on {os.uname().nodename}; set `scratch` in the profile"
            )
        text = value + ("/" + rest if rest else "")
    path = Path(text)
    if not path.is_absolute() or not path.is_dir():
        raise LaunchError(
            f"scratch: {path} is no directory on {os.uname().nodename}; set `scratch` in the profile"
        )
    return path


def steps(job_id: str, name: str) -> list[str] | None:
    """Return the ids of the steps of that name that are still there; None if Slurm does not say."""
    line = ["squeue", "--noheader", "--steps", "--jobs", job_id, "--format=%i %j"]
    try:
        found = [row.split(maxsplit=1) for row in commands.run(line).splitlines()]
    except SlurmError:
        return None
    return sorted(row[0] for row in found if row[1:] == [name])


def _interfaces(interface: str | None) -> Mapping[str, str]:
    if interface is None:
        return {}
    return {
        "OMPI_MCA_btl_tcp_if_include": interface,
        "PRTE_MCA_prte_if_include": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "GLOO_SOCKET_IFNAME": interface,
    }
