"""What keeps a run from starting though config and profile agree: paths, models, Slurm's partitions."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import platformdirs

from hpc_rollart.config.cluster import Cluster, python_of
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.jobs import commands
from hpc_rollart.jobs.commands import CommandMissing, Runner, SlurmError
from hpc_rollart.launch.batch import ODD
from hpc_rollart.launch.placement import Placement, slurm_seconds, slurm_time

_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")


def paths(config: RunConfig, cluster: Cluster, run_dir: Path, *, shared: bool) -> list[str]:
    """Return what is wrong with where things lie, one line each.

    Parameters
    ----------
    shared
        Whether the user says that all nodes see the paths, whatever they look like.
    """
    lines = []
    if odd := ODD.search(str(run_dir)):
        lines.append(f"run.dir: {run_dir} has {odd.group()!r} in it, which sbatch cannot write a log to")
    if not shared:
        local = _local(cluster)
        say = "or say --shared if all nodes do see it"
        lines += [f"run.dir: {text}; choose another with --dir, {say}" for text in _inside(run_dir, local)]
        python = Path(python_of(cluster))
        if python.is_absolute():
            lines += [f"python: {text}; install in your home, {say}" for text in _inside(python, local)]
        if config.model.path is not None:
            model = Path(config.model.path)
            lines += [f"model.path: {text}; move it, {say}" for text in _inside(model, local)]
    return [*lines, *_model(config)]


def _local(cluster: Cluster) -> list[Path]:
    """Return the directories that each node has of its own."""
    scratch = cluster.scratch
    if scratch.startswith("$"):
        name, slash, rest = scratch[1:].partition("/")
        value = os.environ.get(name, "")
        scratch = f"{value}{slash}{rest}" if value else ""
    return [Path(text) for text in dict.fromkeys((*_NODE_LOCAL, scratch)) if text.startswith("/")]


def _inside(path: Path, local: Sequence[Path]) -> Iterator[str]:
    path = path.expanduser().absolute()
    for root in local:
        if root == path or root in path.parents or root in path.resolve().parents:
            yield f"{path} is below {root}, which is local to each node"
            return


def _model(config: RunConfig) -> Iterator[str]:
    """Say which built-in model a node could not make, as it has no internet."""
    name = config.model.builtin
    if config.model.path is not None or name is None or name == "tiny":
        return
    root = os.environ.get("ROLLART_CACHE") or platformdirs.user_cache_dir("hpc_rollart")
    if not any((Path(root).expanduser() / "models").glob(f"{name}-*/config.json")):
        yield (
            f"model.builtin: {name} is not made yet, and compute nodes have no internet: first run "
            f"hpc-rollart model build CONF here (in {root}, which they must see; set ROLLART_CACHE)"
        )


def partitions(placed: Sequence[Placement], cluster: Cluster, runner: Runner = commands.run) -> list[str]:
    """Return why Slurm's partitions would never start the job, one line each; it accepts many such jobs.

    What Slurm does not say is not checked: sbatch has the last word.
    """
    lines: list[str] = []
    for site in dict.fromkeys(part.site_partition for part in placed if part.site_partition):
        parts = [part for part in placed if part.site_partition == site]
        found = [_partition(name, parts, cluster, runner) for name in site.split(",")]
        if all(found):  # of several partitions Slurm takes one that fits
            lines += [f"cluster: partitions.{parts[0].partition}: {text}" for each in found for text in each]
    return lines


def _partition(name: str, parts: Sequence[Placement], cluster: Cluster, runner: Runner) -> list[str]:
    try:
        said = runner(["scontrol", "--oneliner", "show", "partition", name])
    except CommandMissing:
        raise
    except SlurmError as error:
        gone = "not found" in error.said.lower() or "invalid partition" in error.said.lower()
        return [f"Slurm has no partition {name}; sinfo lists those there are"] if gone else []
    return list(_never(said, name, [part.nodes for part in parts], cluster.time))


def _never(said: str, name: str, nodes: Sequence[int], time_s: float) -> Iterator[str]:
    values = dict(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", said))
    if (state := values.get("State", "UP")) != "UP":
        yield f"Slurm's partition {name} is {state}; wait until sinfo shows it up, or use another"
    total, most = values.get("TotalNodes", ""), values.get("MaxNodes", "")
    # No two components share a node, but each is a job of its own to the partition's limit.
    if total.isdecimal() and 0 < int(total) < sum(nodes):
        yield f"{sum(nodes)} nodes, but Slurm's partition {name} has {total}; use fewer"
    elif most.isdecimal() and max(nodes) > int(most):
        yield f"{max(nodes)} nodes, but a job may have {most} in Slurm's partition {name}; use fewer"
    longest = slurm_seconds(values.get("MaxTime", "UNLIMITED"))
    if longest is not None and time_s > longest:
        yield f"Slurm's partition {name} runs jobs of at most {slurm_time(longest)}; ask for less with --time"
