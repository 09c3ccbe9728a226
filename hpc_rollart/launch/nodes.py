"""Asks every node of a job how it is: which ones live, and which are not as promised."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rollart.config.cluster import Cluster, interface_of, python_of
from hpc_rollart.config.schema import Component, RunConfig
from hpc_rollart.jobs.commands import clean_environment
from hpc_rollart.launch import agent
from hpc_rollart.launch.allocation import Allocation, Group
from hpc_rollart.launch.nodecheck import missing_interface
from hpc_rollart.launch.slurm_world import scratch_base

# A node that is well answers within a second or two; srun itself gives up on a dead one after about as long.
DEADLINE_S = 20.0
# The first time it may have to read Python from a busy file system, or wake a GPU's driver.
FIRST_DEADLINE_S = 60.0
_AT_ONCE = 64
_MAX_SKEW_S = 5.0


@dataclass(frozen=True)
class NodeReport:
    """What is known of one node.

    Attributes
    ----------
    host, component
        Which node, and whose it is.
    answered
        Whether it said anything at all.
    problem
        Why it cannot be used; empty if it can.
    facts
        What it said; see `nodecheck.facts`.
    skew_s
        Seconds by which its clock is ahead of this node's, at least.
    """

    host: str
    component: str
    answered: bool
    problem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    skew_s: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether ranks may be put there."""
        return not self.problem


def check_nodes(
    config: RunConfig,
    cluster: Cluster,
    allocation: Allocation,
    run_dir: Path,
    packages: Sequence[str] = (),
    *,
    see: Path | None = None,
    ask_gpus: bool = False,
    deadline_s: float = DEADLINE_S,
) -> list[NodeReport]:
    """Ask every node of the job, 64 at a time; takes seconds, or the deadline for each 64 that are silent.

    Parameters
    ----------
    config, cluster
        What the nodes are to be fit for.
    packages
        Distributions whose versions each node is to report.
    see
        File or directory that every node has to see.
    ask_gpus
        Whether to ask for the GPUs' names, which takes seconds on some nodes.
    deadline_s
        A node that has not answered by then counts as gone.
    """
    asked = [f"--see={see}"] if see is not None else []
    asked += ["--ask-gpus"] if ask_gpus else []
    places = [(group, host) for group in allocation.groups for host in group.hosts]
    base = scratch_base(cluster)

    def ask(place: tuple[Group, str]) -> NodeReport:
        group, host = place
        part = config.components[group.component]
        words = [str(run_dir), str(base), *asked, *packages]
        return _ask(allocation.job_id, group, host, part, words, cluster, deadline_s)

    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return list(pool.map(ask, places))


def visible_gpus(variables: dict[str, str]) -> list[str]:
    """Return the GPUs that Slurm gave a step, by what it says in its environment."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"):
        if variables.get(name):
            return variables[name].split(",")
    return []


def _ask(
    job_id: str,
    group: Group,
    host: str,
    part: Component,
    words: Sequence[str],
    cluster: Cluster,
    deadline_s: float,
) -> NodeReport:
    python = python_of(cluster)
    probe = [python, "-m", "hpc_rollart.launch.nodecheck", *words]
    if host == os.environ.get("SLURMD_NODENAME", os.uname().nodename):
        line, env = probe, dict(os.environ)  # this node; its GPUs are in this process's environment
    else:
        cpus = part.cpus_per_rank * part.ranks_per_node
        line = [*agent.step_command(job_id, group.index, host, cpus, "nodecheck"), *probe]
        env = agent.step_environment(clean_environment(os.environ), job_id)
    before = time.time()
    with subprocess.Popen(
        line, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # srun then ends its step
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
            return NodeReport(host, group.component, False, f"no answer within {deadline_s:g} s")
    after = time.time()
    try:
        facts = json.loads(out.splitlines()[-1])  # the site's prolog may have printed something before
        seen = float(facts["t"])
    except (ValueError, IndexError, KeyError, TypeError):
        said = " ".join(errors.split())[-300:] or f"srun ended with code {process.returncode}"
        return NodeReport(host, group.component, False, said)
    skew = max(seen - after, 0.0) - max(before - seen, 0.0)
    problem = _problem(facts, part, skew, interface_of(cluster, part))
    return NodeReport(host, group.component, True, problem, facts, skew)


def _problem(facts: dict[str, Any], part: Component, skew: float, interface: str) -> str:
    """Return why the node cannot be used as it is, or nothing."""
    for key in ("run_dir", "scratch", "memory"):
        if facts[key]:
            return f"cannot write {facts[key]}"
    wanted = getattr(part, "gpus_per_rank", 0) * part.ranks_per_node
    seen = len(visible_gpus(facts["gpus"]))
    if seen < wanted:
        return f"{wanted} GPUs were asked for and it sees {seen}"
    if abs(skew) > _MAX_SKEW_S:
        way = "ahead" if skew > 0 else "behind"
        return f"its clock is {abs(skew):.0f} s {way}, so timelines would not match; have it set"
    if gone := missing_interface(interface, facts["interfaces"]):
        return f"{gone}; correct interface in the cluster's profile"
    return ""
