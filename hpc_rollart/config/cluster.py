"""What a cluster looks like to a run: its partitions, options, software and nodes, from conf/cluster/*.yaml.

A profile says what is true of the site, whatever is run there; what a run needs is in its own config. Rules
for writing one are in docs/clusters.md.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hpc_rollart.config.load import ConfigError, check_document
from hpc_rollart.config.schema import Count, Name, Seconds, Section

# Text that becomes the value of an sbatch option: one word, so that it cannot become anything else.
Word = Annotated[str, Field(pattern=r"^[^\s'\"\\`$;&|<>(){}]+$", max_length=200)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Partition(Section):
    """One kind of node, and the sbatch options that ask for it."""

    partition: Word | None = None
    """`--partition`; null where the site chooses it from the other options."""
    gpu: Name | None = None
    """Type of the GPUs, in this profile's words; a component's `gpu` names it. Null: a CPU partition."""
    gres: Word | None = None
    """`--gres` with `{count}` for the number of GPUs of a node, such as `gpu:a100:{count}`."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs of one node."""
    cpus_per_node: Count | None = None
    """Cores that a job may use on one node; null: not checked."""
    whole_nodes: bool = False
    """The site gives whole nodes only, and all their GPUs."""
    account: Word | None = None
    """`--account` of this partition, where it differs from the profile's; `{account}` stands for that."""
    qos: Word | None = None
    """`--qos`, where it differs from the profile's."""
    constraint: Word | None = None
    """`--constraint`."""
    memory: Word | None = None
    """`--mem` of one node, such as `64G` or `0` for all of it."""
    max_nodes: Count | None = None
    """Most nodes of one job here; null: not checked."""
    max_time: Seconds | None = None
    """Longest job here; null: not checked."""
    options: dict[Name, Word | bool | int] = {}
    """Further sbatch options by long name, without the dashes; `true` for one without a value."""
    interface: Word | None = None
    """Network interface of these nodes, where it differs from the profile's."""


class Container(Section):
    """Image in which the ranks run; the batch step and Slurm's commands stay outside."""

    image: str
    """File of the image, visible on every node."""
    runtime: Literal["apptainer", "singularity"] = "apptainer"
    """Program that runs it."""
    python: str = "python3"
    """Python inside the image that has hpc_rollart with its parts for a run."""
    gpu: Literal["nv", "rocm", "none"] = "nv"
    """How GPUs come into the image."""
    binds: list[str] = []
    """Directories to bind, `SOURCE` or `SOURCE:TARGET`; the run directory and scratch always are."""


class Signal(Section):
    """The warning that Slurm sends before the end of a job."""

    name: Literal["USR1", "USR2", "TERM"] = "USR2"
    """Which signal; all three stop a run in good order, whoever sends them."""
    request: bool = True
    """Ask for it with `--signal`; false where the site forbids that or sends one of its own."""


class Cluster(Section):
    """A cluster profile."""

    description: str
    """The machine, in a line."""
    tested: bool = False
    """Whether somebody ran hpc_rollart there. Untested profiles are written from public documentation."""
    partitions: Annotated[dict[Name, Partition], Field(min_length=1)]
    """Name to partition."""
    roles: dict[Literal["trainer", "generator", "env"], Name]
    """Partition of a component that names neither a partition nor a GPU type, by role."""
    account: Word | None = None
    """`--account`; null: none, or to be given with `hpc-rollart submit --account`."""
    account_needed: bool = False
    """Whether the site refuses jobs without an account."""
    qos: Word | None = None
    """`--qos`."""
    reservation: Word | None = None
    """`--reservation`."""
    time: Seconds = 3600.0
    """Time limit of a job that is given none."""
    het: bool = True
    """Whether the site takes heterogeneous jobs."""
    requeue: bool = True
    """Whether the site lets a job requeue itself; otherwise it ends, and `hpc-rollart resubmit` goes on."""
    signal: Signal = Signal()
    """The warning before the end of a job."""
    launcher: Literal["mpirun", "srun"] | None = None
    """How ranks are started here, in place of the run's `launch.launcher`."""
    pmix: Word = "pmix"
    """Value of srun's `--mpi` for launcher `srun`."""
    modules: list[Word] = []
    """Modules to load first, in order; `module purge` comes before them."""
    setup: list[str] = []
    """Shell lines that the batch script runs before anything else, word for word as they stand here."""
    environment: dict[VariableName, str] = {}
    """Variables for every rank."""
    python: str | None = None
    """Python on the compute nodes; null: the one that submits. It must be visible on every node."""
    container: Container | None = None
    """Image in which the ranks run; null: none."""
    gpu_vendor: Literal["nvidia", "amd"] = "nvidia"
    """Whose GPUs these are: decides which variable shows them to a rank."""
    scratch: str = "/tmp"
    """Node-local directory, for sockets, caches and temporary files; `$NAME` at its start is a variable."""
    interface: Word | None = None
    """Network interface between the nodes for MPI and NCCL; null: they choose."""
    options: dict[Name, Word | bool | int] = {}
    """Further sbatch options of every component."""


def load_cluster(name: str, overrides: Sequence[str] = ()) -> Cluster:
    """Read and check a profile.

    Parameters
    ----------
    name
        Path of a YAML file, or the name of one in `conf/cluster` here, in
        `~/.config/hpc_rollart/cluster`, or in the `conf/cluster` that came with this program.
    overrides
        `key=value` each, as a run's.

    Raises
    ------
    ConfigError
        There is none of that name, or it is wrong; one line per problem.
    """
    path = find_cluster(name)
    cluster: Cluster = check_document(path, overrides, Cluster)
    problems = _across_keys(cluster)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return cluster


def find_cluster(name: str) -> Path:
    """Return the file of the profile `name`; raises `ConfigError` with the names that there are."""
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        return Path(name).expanduser()
    for folder in _folders():
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = ", ".join(cluster_names()) or "none"
    raise ConfigError([f"cluster: there is no profile {name!r}; profiles: {known}; or give a file"])


def cluster_names() -> list[str]:
    """Return the names of all profiles that `find_cluster` finds by name."""
    return sorted({path.stem for folder in _folders() if folder.is_dir() for path in folder.glob("*.yaml")})


def _folders() -> list[Path]:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    shipped = Path(__file__).parents[2] / "conf" / "cluster"
    return [Path("conf/cluster").absolute(), config / "hpc_rollart" / "cluster", shipped]


def _across_keys(cluster: Cluster) -> list[str]:
    problems: list[str] = []
    known = ", ".join(cluster.partitions)
    for role, name in cluster.roles.items():
        if name not in cluster.partitions:
            problems.append(f"roles.{role}: there is no partition {name!r}; partitions: {known}")
    for name, part in cluster.partitions.items():
        where = f"partitions.{name}"
        if (part.gpu is None) != (part.gpus_per_node == 0):
            problems.append(f"{where}: give gpu and gpus_per_node both, or neither")
        if part.gres is not None and "{count}" not in part.gres:
            problems.append(f"{where}.gres: {part.gres!r} has no {{count}} for the number of GPUs")
    return problems


def partition_of(cluster: Cluster, component: Any) -> str:
    """Return the name of the partition that a component of a run's config goes to.

    Raises
    ------
    ValueError
        There is none; the message says what there is.
    """
    parts = cluster.partitions
    if component.partition is not None:
        if component.partition not in parts:
            raise ValueError(f"there is no partition {component.partition!r}; partitions: {', '.join(parts)}")
        return str(component.partition)
    wanted = getattr(component, "gpu", None)
    if wanted is not None:
        for name, part in parts.items():
            if part.gpu == wanted:
                return name
        types = ", ".join(dict.fromkeys(part.gpu for part in parts.values() if part.gpu)) or "none"
        raise ValueError(f"no partition has GPU type {wanted!r}; types: {types}")
    if component.role not in cluster.roles:
        raise ValueError(f"the profile's roles name no partition for {component.role}; set `partition`")
    return cluster.roles[component.role]
