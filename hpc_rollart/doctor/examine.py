"""Will this run start there? Checks this machine, a job's nodes, or a cluster by way of a short job."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hpc_rollart.config.cluster import Cluster
from hpc_rollart.config.load import check_document
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.doctor import here
from hpc_rollart.doctor.nodes import node_findings
from hpc_rollart.doctor.probe import PACKAGES
from hpc_rollart.doctor.results import Finding, from_line
from hpc_rollart.doctor.world import try_world
from hpc_rollart.errors import UserError
from hpc_rollart.launch import rundir
from hpc_rollart.launch.allocation import Allocation
from hpc_rollart.launch.attempt import Attempt
from hpc_rollart.launch.mpirun import LocalLauncher
from hpc_rollart.launch.nodes import FIRST_DEADLINE_S, check_nodes
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.slurm_world import make_launcher, scratch_base

__all__ = ["examine_here", "examine_job", "load_unchecked", "temporary_run"]

Say = Callable[[str], None]


def load_unchecked(path: Path, overrides: list[str]) -> RunConfig:
    """Read a run's config; what keeps it from starting is for the doctor to find.

    Raises
    ------
    ConfigError
        It cannot be read, or its schema is broken: then there is nothing to examine.
    """
    return check_document(path, overrides, RunConfig)


def examine_here(config: RunConfig, say: Say = lambda _: None) -> list[Finding]:
    """Find out whether `hpc-rollart run` would start on this machine.

    Parameters
    ----------
    say
        Told what is being done.
    """
    say("looking at this machine")
    found = here.configuration(config, here=True)
    found += here.packages()
    found += here.storage(config)
    found += here.model(config)
    found += here.cores(config)
    found += here.scratch(config, LocalLauncher.scratch)
    blocking = {"configuration", "packages", "mpirun", "/dev/shm", "scratch", "run directory"}
    if any(finding.level == "fail" and finding.check in blocking for finding in found):
        return [*found, Finding("MPI world", "this machine", "skipped", "not started: mend the above first")]
    say(f"starting {sum(part.ranks for part in config.components.values())} ranks")
    with temporary_run(config) as (small, run):
        return found + try_world(small, run, LocalLauncher())


def examine_job(
    config: RunConfig, cluster: Cluster, allocation: Allocation, run: RunDir, say: Say = lambda _: None
) -> list[Finding]:
    """Find out whether a run would start on the nodes of the job that this process is in.

    Parameters
    ----------
    config
        Of the run, its directory replaced by `run`.
    run
        A directory for this purpose alone, on the file system of the run's own.
    """
    found: list[Finding] = []
    by_mpirun = (cluster.launcher or config.launch.launcher) == "mpirun"
    for host, names in allocation.shared_hosts().items() if by_mpirun else ():
        text = f"given to components {' and '.join(names)} both"
        mend = "ask for whole nodes: whole_nodes: true in the profile's partition"
        found.append(Finding("nodes apart", host, "fail", text, mend))
    say(f"asking {len(allocation.hosts)} nodes")
    packages = () if cluster.container else PACKAGES  # inside the image the ranks compare them
    try:
        found += here.socket_path(scratch_base(cluster))
        with _to_see(config) as see:
            reports = check_nodes(
                config,
                cluster,
                allocation,
                run.path,
                packages,
                see=see,
                ask_gpus=cluster.gpu_vendor == "nvidia",
                deadline_s=FIRST_DEADLINE_S,
            )
    except UserError as error:
        return [*found, from_line("scratch", os.uname().nodename, str(error))]
    found += node_findings(reports, config, cluster)
    # Ranks cannot start without these; a node with too few GPUs is for its ranks to tell.
    blocking = {"nodes apart", "node answers", "run directory", "scratch", "network", "packages"}
    if any(finding.level == "fail" and finding.check in blocking for finding in found):
        return [*found, Finding("MPI world", "all nodes", "skipped", "not started: mend the above first")]
    say(f"starting {sum(part.ranks for part in config.components.values())} ranks")
    try:
        launcher = make_launcher(config, cluster, allocation, run, Attempt(0))
    except UserError as error:
        return [*found, from_line("launcher", "all nodes", str(error))]
    return found + try_world(config, run, launcher)


@contextlib.contextmanager
def temporary_run(
    config: RunConfig, *, keep_on: type[Exception] | None = None
) -> Iterator[tuple[RunConfig, RunDir]]:
    """Make a run directory beside the run's own, as on the same file system, and remove it at the end.

    Parameters
    ----------
    keep_on
        Error of the body at which the directory stays.

    Yields
    ------
    tuple
        The config with this directory in it, and the directory.
    """
    beside = here.existing_parent(Path(config.run.dir).expanduser().absolute())
    path = Path(tempfile.mkdtemp(prefix=".rollart-doctor-", dir=beside))
    small = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(path)})})
    try:
        yield small, rundir.create(small, sys.argv)
    except BaseException as error:
        if keep_on is None or not isinstance(error, keep_on):
            shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _to_see(config: RunConfig) -> Iterator[Path | None]:
    """Yield a path that all nodes must see: the model, or a file where built-in models are made."""
    if config.model.path is not None:
        yield Path(config.model.path).expanduser().absolute()
        return
    root = here.cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        marker = tempfile.NamedTemporaryFile(prefix=".rollart-doctor-", dir=root)  # noqa: SIM115
    except OSError:
        yield root
        return
    with marker:
        yield Path(marker.name)
