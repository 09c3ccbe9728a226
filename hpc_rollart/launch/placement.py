"""Where each component of a run goes on a cluster, and which sbatch options say so."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from hpc_rollart.config import problem
from hpc_rollart.config.cluster import Cluster, Partition, partition_of
from hpc_rollart.config.cluster_words import Word
from hpc_rollart.config.problem import ConfigError
from hpc_rollart.config.schema import MAX_SECONDS, AnyComponent, RunConfig, Seconds
from hpc_rollart.launch.batch import HetComponent, Option

# In a het job each option of a component is taken over by those after it that do not set it, except these.
_OWN = frozenset({"nodes", "ntasks-per-node", "cpus-per-task", "gres", "gpus-per-node", "exclusive"})
_WORDS_OF_TIME = "expected a duration such as 90m or 12h, or Slurm's 12:00:00 or 2-00:00:00, at most 3650d"


@dataclass(frozen=True)
class Placement:
    """One component of a run and its place.

    Attributes
    ----------
    component
        Its name in the run's config.
    partition
        The profile's name of its partition; `site_partition` is Slurm's, empty where the site chooses.
    gpus
        GPUs of each node.
    options
        sbatch options of this het component.
    """

    component: str
    role: str
    partition: str
    site_partition: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus: int
    gpu: str
    options: dict[str, Option]

    @property
    def het(self) -> HetComponent:
        """The component as the batch script has it."""
        name = self.component if self.component == self.role else f"{self.component} ({self.role})"
        ranks = f"{_count(self.nodes, 'node')} x {_count(self.ranks_per_node, 'rank')}"
        cores = f"{_count(self.cpus_per_rank, 'core')} a rank"
        gpus = f", {_count(self.gpus, f'{self.gpu} GPU')} a node" if self.gpus else ""
        return HetComponent(f"{name}, {ranks}, {cores}{gpus}", self.options)


def place(config: RunConfig, cluster: Cluster, *, stops: bool = True) -> list[Placement]:
    """Return the places of all components, in rank order.

    Parameters
    ----------
    stops
        Whether the job stops by itself before its end, as a run does.

    Raises
    ------
    ConfigError
        The run does not fit the cluster; one line per problem, with key and mend.
    """
    lines = list(_whole_job(config, cluster, stops=stops))
    placed: list[Placement] = []
    for name, part in config.components.items():
        where = f"components.{name}"
        try:
            partition = partition_of(cluster, part)
        except ValueError as error:
            lines.append(f"{where}: {error}")
            continue
        if cluster.account_needed and _account(cluster, cluster.partitions[partition]) is None:
            lines.append("cluster: the site refuses jobs without an account; give one with --account")
        found = [f"{where}.{text}" for text in _fits(part, partition, cluster)]
        lines += found
        if not found:
            placed.append(_placement(config, cluster, name, part, partition))
    lines = lines or list(_taken_over(placed))
    if lines:
        raise ConfigError(list(dict.fromkeys(lines)))
    return placed


def with_choices(cluster: Cluster, *, account: str | None, qos: str | None, time: str | None) -> Cluster:
    """Return the profile with what the command line says of account, QOS and time limit.

    An account or a QOS from the command line is meant for all components, so what a partition says itself
    is dropped, but for an account made of the profile's, such as `{account}_gpu`.
    """
    update: dict[str, object] = {}
    parts = dict(cluster.partitions)
    for name, part in parts.items():
        change: dict[str, None] = {}
        if account is not None and "{account}" not in (part.account or ""):
            change["account"] = None
        if qos is not None:
            change["qos"] = None
        parts[name] = part.model_copy(update=change)
    update |= {"partitions": parts}
    update |= {"account": account} if account is not None else {}
    update |= {"qos": qos} if qos is not None else {}
    update |= {"time": seconds_of(time)} if time is not None else {}
    for key in ("account", "qos"):
        value = update.get(key)
        try:
            # As the profile's own key: what is submitted must be readable again from RUN/cluster.yaml.
            TypeAdapter(Word | None).validate_python(value)
        except ValidationError:
            raise ConfigError([f"--{key}: '{problem.short(str(value))}' is no name of one"]) from None
    return cluster.model_copy(update=update)


def seconds_of(text: str) -> float:
    """Return a time limit in seconds, from `12h` as everywhere here or `12:00:00` as Slurm has it."""
    value = slurm_seconds(text)
    if value is not None and 0 < value <= MAX_SECONDS:
        return value
    try:
        bounded: TypeAdapter[float] = TypeAdapter(Annotated[Seconds, Field(allow_inf_nan=False)])
        return bounded.validate_python(text)
    except ValidationError:
        raise ConfigError([f"--time {problem.short(text)}: {_WORDS_OF_TIME}"]) from None


def slurm_seconds(text: str) -> float | None:
    """Return the seconds of `12:00:00` or `2-00:00:00`, None for what is not in this form of Slurm's."""
    days, dash, rest = text.rpartition("-")
    fields = rest.split(":")
    if not (dash or len(fields) > 1) or len(fields) > 3:
        return None
    # What has more digits is too long in any case, and thousands of them are no number to Python.
    if not all(part.isdecimal() and len(part) < 10 for part in (*fields, *([days] if dash else []))):
        return None
    numbers = [int(part) for part in fields]
    # With days it is hours[:minutes[:seconds]], without them minutes:seconds or hours:minutes:seconds.
    numbers = numbers + [0] * (3 - len(numbers)) if dash else [0] * (3 - len(numbers)) + numbers
    return 86400.0 * int(days or 0) + 3600 * numbers[0] + 60 * numbers[1] + numbers[2]


def slurm_time(seconds: float) -> str:
    """Return a time limit in Slurm's words, rounded up to its minutes."""
    minutes = max(1, -int(-seconds // 60))
    days, minutes = divmod(minutes, 1440)
    clock = f"{minutes // 60:02}:{minutes % 60:02}:00"
    return f"{days}-{clock}" if days else clock


def dump(cluster: Cluster) -> str:
    """Return the profile as YAML that reads back to an equal one."""
    return yaml.safe_dump(cluster.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


# --- what does not fit -------------------------------------------------------------------------------


def _whole_job(config: RunConfig, cluster: Cluster, *, stops: bool) -> Iterator[str]:
    if len(config.components) > 1 and not cluster.het:
        yield (
            f"cluster: this one takes no heterogeneous jobs (het: false), and the run has "
            f"{len(config.components)} components, each of which is one"
        )
    # With or without Slurm's signal: the supervisor goes by the job's end.
    if stops and config.launch.stop_lead_s >= cluster.time:
        yield (
            f"launch.stop_lead_s: {config.launch.stop_lead_s:g} s before the end is no less than the whole "
            f"time limit of {cluster.time:g} s; ask for more with --time, or lower it"
        )


def _fits(part: AnyComponent, name: str, cluster: Cluster) -> Iterator[str]:
    there = cluster.partitions[name]
    gpu, each = getattr(part, "gpu", None), getattr(part, "gpus_per_rank", 0)
    wanted, cores = each * part.ranks_per_node, part.cpus_per_rank * part.ranks_per_node
    if gpu is not None and gpu != there.gpu:
        yield f"gpu: partition {name} has {there.gpu or 'no GPUs'}, not {gpu}; name another partition or type"
    elif wanted and not there.gpus_per_node:
        yield f"gpus_per_rank: partition {name} has no GPUs; use 0, or set partition or gpu"
    elif wanted > there.gpus_per_node:
        yield (
            f"gpus_per_rank: {part.ranks_per_node} x {each} GPUs, but a node of {name} has "
            f"{there.gpus_per_node}; use fewer GPUs or ranks_per_node"
        )
    if there.cpus_per_node is not None and cores > there.cpus_per_node:
        yield (
            f"cpus_per_rank: {part.ranks_per_node} x {part.cpus_per_rank} cores, but a node of {name} has "
            f"{there.cpus_per_node}; use fewer cores or ranks_per_node"
        )
    if there.max_nodes is not None and part.nodes > there.max_nodes:
        yield f"nodes: {part.nodes}, but a job may have {there.max_nodes} in {name}; use fewer"
    if there.max_time is not None and cluster.time > there.max_time:
        yield (
            f"partition: {name} runs jobs of at most {slurm_time(there.max_time)}, not "
            f"{slurm_time(cluster.time)}; ask for less with --time"
        )


def _taken_over(placed: Sequence[Placement]) -> Iterator[str]:
    """Say which options a component would take over from one before it, though it has none of its own."""
    for index, later in enumerate(placed):
        for earlier in placed[:index]:
            for name in earlier.options:
                if name not in _OWN and name not in later.options:
                    yield (
                        f"cluster: partitions.{earlier.partition} sets --{name} and partitions."
                        f"{later.partition} does not; Slurm would give {later.component} the value of "
                        f"{earlier.component}, so say it for both"
                    )


# --- options -----------------------------------------------------------------------------------------


def _placement(
    config: RunConfig, cluster: Cluster, name: str, part: AnyComponent, partition: str
) -> Placement:
    there = cluster.partitions[partition]
    wanted = getattr(part, "gpus_per_rank", 0) * part.ranks_per_node
    gpus = there.gpus_per_node if there.whole_nodes else wanted
    lead = round(config.launch.stop_lead_s)
    asked: dict[str, Option | None] = {
        "partition": there.partition,
        "account": _account(cluster, there),
        "qos": there.qos or cluster.qos,
        "reservation": cluster.reservation,
        "constraint": there.constraint,
        "time": slurm_time(cluster.time),
        # B: the batch step's process alone. The steps hold mpirun's daemons, which would die of it.
        "signal": f"B:{cluster.signal.name}@{lead}" if cluster.signal.request else None,
        # A lost node ends an attempt, not the job.
        "no-kill": True,
        "requeue" if cluster.requeue else "no-requeue": True,
        "nodes": part.nodes,
        "ntasks-per-node": part.ranks_per_node,
        "cpus-per-task": part.cpus_per_rank,
        **_gpus(there, gpus),
        "mem": there.memory,
        "exclusive": True if there.whole_nodes else None,
    }
    asked |= cluster.options | there.options
    options = {key: value for key, value in asked.items() if value is not None and value is not False}
    return Placement(
        component=name,
        role=part.role,
        partition=partition,
        site_partition=there.partition or "",
        nodes=part.nodes,
        ranks_per_node=part.ranks_per_node,
        cpus_per_rank=part.cpus_per_rank,
        gpus=gpus,
        gpu=there.gpu or "",
        options=options,
    )


def _gpus(there: Partition, count: int) -> dict[str, Option | None]:
    if not count:
        return {}
    if there.gres is not None:
        return {"gres": there.gres.replace("{count}", str(count))}
    # Whole nodes come with their GPUs, and some sites refuse jobs that ask for those they get anyway.
    return {} if there.whole_nodes else {"gpus-per-node": f"{there.gpu}:{count}"}


def _account(cluster: Cluster, there: Partition) -> str | None:
    if there.account is None:
        return cluster.account
    if "{account}" not in there.account:
        return there.account
    return there.account.replace("{account}", cluster.account) if cluster.account else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
