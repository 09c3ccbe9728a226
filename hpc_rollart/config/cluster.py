"""What a cluster looks like to a run: its partitions, options, software and nodes, from conf/cluster/*.yaml.

A profile says what is true of the site, whatever is run there; what a run needs is in its own config. Rules
for writing one are in docs/clusters.md.
"""

import os
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from hpc_rollart.config import cluster_words, explain
from hpc_rollart.config.cluster_words import Account, Constraint, Gres, Option, Scratch, VariableName, Word
from hpc_rollart.config.load import ConfigError, check_document
from hpc_rollart.config.problem import Problem, short
from hpc_rollart.config.schema import Count, Name, Seconds, Section


class Partition(Section):
    """One kind of node, and the sbatch options that ask for it."""

    partition: Word | None = None
    """`--partition`; null where the site chooses it from the other options."""
    gpu: Name | None = None
    """Type of the GPUs, in this profile's words; a component's `gpu` names it, and means the first partition
    that has it. Null: no GPUs are asked for here."""
    gres: Gres | None = None
    """`--gres` with `{count}` for the number of GPUs on a node, such as `gpu:a100:{count}`; null:
    `--gpus-per-node` with the type `gpu`, which then must be the site's name for it."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs of one node."""
    cpus_per_node: Count | None = None
    """Cores, not hardware threads, that a job may use on one node; null: not checked."""
    whole_nodes: bool = False
    """Ask for whole nodes with all their GPUs, as some sites give no others. Where nodes are shared,
    components in the same partition need this too, so that each has nodes of its own."""
    account: Account | None = None
    """`--account` of this partition, where it differs from the profile's; `{account}` stands for that."""
    qos: Word | None = None
    """`--qos`, where it differs from the profile's."""
    constraint: Constraint | None = None
    """`--constraint`; features may be joined, such as `gpu&hbm80g`."""
    memory: Word | None = None
    """`--mem` of one node, such as `64G` or `0` for all of it."""
    max_nodes: Count | None = None
    """Most nodes of one job here; null: not checked."""
    max_time: Seconds | None = None
    """Longest job here; null: not checked."""
    options: dict[Name, Option] = {}
    """Further sbatch options by long name, without the dashes; `true` for one without a value, `false` to
    leave out one of the profile's."""
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
    """Shell lines that the batch script runs once the modules are loaded, word for word as they stand
    here."""
    environment: dict[VariableName, str] = {}
    """Variables for every rank, their values taken literally; not what Slurm, MPI or this program sets."""
    python: str | None = None
    """Python on the compute nodes; null: the one that submits. It must be visible on every node."""
    container: Container | None = None
    """Image in which the ranks run; null: none."""
    gpu_vendor: Literal["nvidia", "amd"] = "nvidia"
    """Whose GPUs these are: decides which variable shows them to a rank."""
    scratch: Scratch = "/tmp"
    """Node-local directory, for sockets, caches and temporary files: an absolute path, or `$NAME` or
    `$NAME/...` with a variable of the nodes."""
    interface: Word | None = None
    """Network interface between the nodes for MPI and NCCL, its full name as `ip -br addr` shows it; null:
    they choose."""
    options: dict[Name, Option] = {}
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
    try:
        return check_document(path, overrides, Cluster, explained=_explained, across=_across_keys)
    except ConfigError as error:
        raise ConfigError([_of_a_cluster(line) for line in error.lines]) from None


def _of_a_cluster(line: str) -> str:
    """Put what was said for a run's file into a cluster's words: the flag of overrides, and examples."""
    line = re.sub(r"^-o ", "-c ", line)
    line = line.replace(" (with -o ", " (with -c ").replace("such as run.steps=100", "such as time=2h")
    line = line.replace("for example run.steps=100", "for example time=2h")
    return line.replace("keys such as run, model and tasks", "keys such as description, partitions and roles")


def _explained(error: ValidationError, data: Any) -> list[Problem]:
    """Return the problems as for a run's file, but with the keys and choices of a cluster's."""
    out = []
    explained = explain.problems(error, data)
    for item, problem in zip(error.errors(include_url=False), explained, strict=True):
        if item["type"] == "extra_forbidden":
            keys = _keys(problem.path[:-1])
            near = explain.nearest(str(problem.path[-1]), keys)
            mend = f"did you mean {near}?" if near else f"keys here: {', '.join(keys)}"
            problem = Problem(problem.path, f"unknown key; {mend}")
        elif item["type"] == "literal_error":
            problem = Problem(
                problem.path, f"must be {item['ctx']['expected']}, not '{short(str(item['input']))}'"
            )
        out.append(problem)
    return out


def _keys(path: tuple[str | int, ...]) -> list[str]:
    """Return the keys that the schema has at `path`."""
    model: type[BaseModel] = Cluster
    for key in path:
        field = model.model_fields.get(str(key))
        if field is not None:  # otherwise a name that the profile chose, such as a partition's
            model = _model(field.annotation) or model
    return list(model.model_fields)


def _model(annotation: Any) -> type[BaseModel] | None:
    """Return the section in an annotation such as `dict[Name, Section]` or `Section | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model, typing.get_args(annotation))), None)


def python_of(cluster: Cluster) -> str:
    """Return the Python that the nodes use outside a container."""
    return cluster.python or sys.executable


def interface_of(cluster: Cluster, component: Any) -> str:
    """Return the network interface that a component's nodes use, empty where MPI and NCCL choose."""
    return cluster.partitions[partition_of(cluster, component)].interface or cluster.interface or ""


def find_cluster(name: str) -> Path:
    """Return the file of the profile `name`; raises `ConfigError` with the names that there are."""
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        return Path(name).expanduser()
    for folder in _folders():
        if os.path.isfile(path := folder / f"{name}.yaml"):  # false, not an error, where the name is too long
            return path
    known = ", ".join(cluster_names()) or "none"
    raise ConfigError([f"cluster: there is no profile '{short(name)}'; profiles: {known}; or give a file"])


def cluster_names() -> list[str]:
    """Return the names of all profiles that `find_cluster` finds by name."""
    return sorted({path.stem for folder in _folders() if folder.is_dir() for path in folder.glob("*.yaml")})


def _folders() -> list[Path]:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    shipped = Path(__file__).parents[2] / "conf" / "cluster"
    return [Path("conf/cluster").absolute(), config / "hpc_rollart" / "cluster", shipped]


def _across_keys(cluster: Cluster) -> list[Problem]:
    problems = [
        *cluster_words.decided("options", cluster.options),
        *cluster_words.variables(cluster.environment),
    ]
    known = ", ".join(cluster.partitions)
    for role, name in cluster.roles.items():
        if name not in cluster.partitions:
            problems.append(Problem(("roles", role), f"there is no partition {name!r}; partitions: {known}"))
    for name, part in cluster.partitions.items():
        problems += _across_partition(name, part)
    if cluster.container is not None:
        fits = {"nvidia": "nv", "amd": "rocm"}[cluster.gpu_vendor]
        if cluster.container.gpu not in (fits, "none"):
            text = (
                f"{cluster.container.gpu} does not fit gpu_vendor {cluster.gpu_vendor}; give {fits} or none"
            )
            problems.append(Problem(("container", "gpu"), text))
    return list(dict.fromkeys(problems))


def _across_partition(name: str, part: Partition) -> list[Problem]:
    path = ("partitions", name)
    problems = cluster_words.decided(f"partitions.{name}.options", part.options)
    if (part.gpu is None) != (part.gpus_per_node == 0):
        problems.append(Problem(path, "give gpu and gpus_per_node both, or neither"))
    elif part.gpu is None and part.gres is not None:
        problems.append(Problem((*path, "gres"), "give gpu and gpus_per_node too, or remove it"))
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
