"""From a run's config to a queued heterogeneous job, and to the next job of the same run."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hpc_rollart
from hpc_rollart.config.cluster import Cluster
from hpc_rollart.config.load import load_resolved
from hpc_rollart.config.problem import ConfigError
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import UserError
from hpc_rollart.launch import jobs, placement, rundir, sitecheck, sitecommands
from hpc_rollart.launch.batch import Batch, Option
from hpc_rollart.launch.jobs import JobPart, JobRecord
from hpc_rollart.launch.placement import Placement
from hpc_rollart.launch.queue import Queue
from hpc_rollart.launch.sitecommands import CommandMissing, Runner
from hpc_rollart.launch.slurm import HetSlurmExecutor, log_file, log_pattern
from hpc_rollart.observe.status import read_status

_ODD = frozenset("%'\"\\\n")


@dataclass(frozen=True)
class Submitted:
    """A job in the queue."""

    run_dir: Path
    job: JobRecord
    placed: list[Placement]


def submit(
    config: RunConfig,
    cluster: Cluster,
    argv: Sequence[str],
    *,
    shared: bool = False,
    runner: Runner = sitecommands.run,
) -> Submitted:
    """Check, make the run directory and submit; if Slurm refuses, nothing is left.

    Parameters
    ----------
    config
        Resolved config.
    cluster
        Profile, with what the command line chose.
    argv
        Command line, for the record.
    shared
        Whether all nodes see the run directory though it looks local.
    runner
        Runs Slurm's commands.

    Raises
    ------
    ConfigError
        The run does not fit the cluster, or the run directory cannot be used.
    SlurmError
        Slurm refused the job; the message has its words.
    """
    config, path, placed = _checked(config, cluster, shared=shared)
    _need_sbatch(runner)
    _refuse(sitecheck.partitions(placed, cluster, runner))
    existed = path.exists()
    made = rundir.create(config, argv)
    try:
        job = _submit(made.path, config, cluster, placed, os.getcwd(), runner)
    except BaseException:
        # No job, so nobody has written anything worth keeping, and the same command works once it is mended.
        shutil.rmtree(made.path, ignore_errors=True)
        if existed:
            made.path.mkdir(mode=0o700, exist_ok=True)
        raise
    return Submitted(made.path, job, placed)


def script(config: RunConfig, cluster: Cluster, *, shared: bool = False) -> str:
    """Return the batch script that `submit` would submit; makes nothing and needs no Slurm."""
    config, path, placed = _checked(config, cluster, shared=shared)
    return _executor(path, config, cluster, placed, os.getcwd(), sitecommands.run).script()


def resubmit(run_dir: Path, cluster: Cluster, *, runner: Runner = sitecommands.run) -> Submitted:
    """Submit another job for a run that has ended early; it goes on from the run's checkpoint.

    Raises
    ------
    UserError
        The run is done, or a job of it is still queued or running.
    """
    run_dir = run_dir.absolute()
    config = load_resolved(run_dir)
    if (read_status(run_dir) or {}).get("state") == "done":
        raise UserError(f"{run_dir}: the run is done, nothing is left to do")
    placed = placement.place(config, cluster)
    try:
        manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
        directory = str(manifest["directory"])
    except (OSError, ValueError, KeyError):
        directory = str(run_dir)
    with jobs.alone(run_dir):
        refuse_if_queued(run_dir, runner)
        _refuse(sitecheck.partitions(placed, cluster, runner))
        jobs.clear_cancelled(run_dir)
        return Submitted(run_dir, _submit(run_dir, config, cluster, placed, directory, runner), placed)


def refuse_if_queued(run_dir: Path, runner: Runner = sitecommands.run) -> None:
    """Raise `UserError` if a job of the run is queued or running: two would write the same files."""
    for record in jobs.records(run_dir)[-1:]:
        state = Queue(record.job, runner).state()
        if state.there:
            raise UserError(
                f"{run_dir}: job {record.job} of this run is still {state.phase.value}; wait for it, or "
                f"end it with hpc-rollart cancel {shlex.quote(str(run_dir))}"
            )


# --- parts -------------------------------------------------------------------------------------------


def _checked(config: RunConfig, cluster: Cluster, *, shared: bool) -> tuple[RunConfig, Path, list[Placement]]:
    placed = placement.place(config, cluster)
    path = rundir.check(config)
    _refuse(sitecheck.paths(config, cluster, path, shared=shared))
    # The job runs elsewhere and later: paths that are relative to here would be others there.
    run = config.run.model_copy(update={"dir": str(path)})
    model = config.model
    if model.path is not None:
        model = model.model_copy(update={"path": str(Path(model.path).expanduser().absolute())})
    return config.model_copy(update={"run": run, "model": model}), path, placed


def _refuse(lines: list[str]) -> None:
    if lines:
        raise ConfigError(lines)


def _need_sbatch(runner: Runner) -> None:
    """Find out that there is no Slurm before anything is made."""
    if runner is sitecommands.run and shutil.which("sbatch") is None:
        raise CommandMissing("no sbatch here: run this on a login node of the cluster")


def _submit(
    run_dir: Path,
    config: RunConfig,
    cluster: Cluster,
    placed: list[Placement],
    directory: str,
    runner: Runner,
) -> JobRecord:
    jobs.write_cluster(run_dir, cluster)
    folder = jobs.folder(run_dir)
    folder.mkdir(exist_ok=True)
    submitted = _executor(run_dir, config, cluster, placed, directory, runner).submit(supervise(run_dir))
    record = JobRecord(
        job=int(submitted.job_id),
        submitted=time.time(),
        script=str(submitted.paths.submission_file),
        log=str(log_file(folder, submitted.job_id)),
        time_s=cluster.time,
        components=[
            JobPart(
                part.component,
                part.site_partition,
                part.nodes,
                part.nodes * part.ranks_per_node,
                part.nodes * part.gpus,
            )
            for part in placed
        ],
    )
    jobs.record(run_dir, record)
    return record


def supervise(run_dir: Path) -> Callable[[], object]:
    """Return what the batch step runs; pickled by name, so it is small and follows the installed code."""
    from hpc_rollart.launch.supervisor import Supervise

    return Supervise(str(run_dir))


def _executor(
    run_dir: Path,
    config: RunConfig,
    cluster: Cluster,
    placed: list[Placement],
    directory: str,
    runner: Runner,
) -> HetSlurmExecutor:
    folder = jobs.folder(run_dir)
    options: dict[str, Option] = {
        "job-name": config.run.name,
        "output": log_pattern(folder),
        "open-mode": "append",
    }
    if not _ODD & set(directory):
        options["chdir"] = directory
    title = [
        f"Run {config.run.name} of hpc_rollart {hpc_rollart.__version__}: one heterogeneous job.",
        f"Directory: {run_dir}",
        "Written by hpc-rollart submit; to submit again, use hpc-rollart resubmit.",
    ]
    # submitit listens for the signal it finds here, in the job.
    environment = {"SUBMITIT_PREEMPT_SIGNAL": cluster.signal.name, **cluster.environment}
    batch = Batch(title, options, [part.het for part in placed], cluster.modules, cluster.setup, environment)
    return HetSlurmExecutor(
        folder,
        batch,
        time_s=cluster.time,
        max_requeues=config.launch.max_requeues,
        python=shlex.quote(cluster.python or sys.executable),
        runner=runner,
    )
