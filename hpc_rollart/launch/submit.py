"""From a run's config to a queued heterogeneous job, and to the next job of the same run."""

import os
import shlex
import shutil
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
from hpc_rollart.jobs import book, commands
from hpc_rollart.jobs.book import JobPart, JobRecord
from hpc_rollart.jobs.commands import CommandMissing, Runner, SlurmError
from hpc_rollart.jobs.queue import Queue
from hpc_rollart.launch import placement, rundir, sitecheck
from hpc_rollart.launch.placement import Placement
from hpc_rollart.launch.slurm import (
    HetSlurmExecutor,
    Unconfirmed,
    find,
    forget,
    log_file,
    make_executor,
    script_file,
    take_up,
    unconfirmed,
)
from hpc_rollart.launch.view import RunView
from hpc_rollart.observe.status import read_status

# A run that has said something within this time is taken to be alive, whoever runs it.
_ALIVE_S = 15.0


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
    runner: Runner = commands.run,
) -> Submitted:
    """Check, make the run directory and submit; if Slurm refuses, nothing is left.

    Ctrl-C while sbatch runs comes too late if the job is in the queue by then: it is submitted.

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
    Unconfirmed
        Slurm did not say whether it took the job; the run directory stays.
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
    except Unconfirmed:
        raise
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
    return _executor(path, config, cluster, placed, os.getcwd(), commands.run).script()


def resubmit(run_dir: Path, cluster: Cluster, *, runner: Runner = commands.run) -> Submitted:
    """Submit another job for a run that has ended early; it goes on from the run's checkpoint.

    Raises
    ------
    UserError
        The run is done, or goes on somewhere, or a job of it is still queued or running.
    Unconfirmed
        Slurm did not say whether it took the job.
    """
    run_dir = run_dir.absolute()
    config = load_resolved(run_dir)
    refuse_if_done(run_dir)
    placed = placement.place(config, cluster)
    directory = rundir.read_manifest(run_dir).get("directory", str(run_dir))
    with book.alone(run_dir):
        refuse_if_queued(run_dir, runner)
        refuse_if_alive(run_dir)
        _refuse(sitecheck.partitions(placed, cluster, runner))
        book.clear_cancelled(run_dir)
        return Submitted(run_dir, _submit(run_dir, config, cluster, placed, directory, runner), placed)


def replace(run_dir: Path, job: int, *, runner: Runner = commands.run) -> JobRecord:
    """Submit the job that goes on with a run once `job` has ended, which cannot go on itself.

    Raises
    ------
    UserError
        Slurm refuses, or does not say whether it took the job (`Unconfirmed`).
    """
    config, cluster = load_resolved(run_dir), book.load_resolved_cluster(run_dir)
    placed = placement.place(config, cluster)
    directory = rundir.read_manifest(run_dir).get("directory", str(run_dir))
    with book.alone(run_dir):
        return _submit(run_dir, config, cluster, placed, directory, runner, after=job)


def refuse_if_done(run_dir: Path) -> None:
    """Raise `UserError` if all steps of the run are done."""
    if _view(run_dir).state == "done":
        raise UserError(f"{run_dir}: the run is done, nothing is left to do")


def refuse_if_alive(run_dir: Path) -> None:
    """Raise `UserError` if the run has reported just now: it goes on in front of somebody, elsewhere."""
    if (silent := _view(run_dir).silent_s()) is not None and abs(silent) < _ALIVE_S:
        raise UserError(
            f"{run_dir}: the run reported {silent:.0f} s ago, so it goes on already; see hpc-rollart watch, "
            f"or wait {_ALIVE_S:.0f} s if it was killed"
        )


def _view(run_dir: Path) -> RunView:
    """Return the run with its status alone; its metrics are not needed, and may be long."""
    return RunView(run_dir, status=read_status(run_dir) or {})


def refuse_if_queued(run_dir: Path, runner: Runner = commands.run) -> None:
    """Raise `UserError` if a job of the run is queued or running: two would write the same files.

    A job that nobody confirmed when it was submitted is taken up here if it is there.
    """
    for script in unconfirmed(book.folder(run_dir)):
        job = find(script, runner)
        if job is None:
            forget(script)
        else:
            cluster = book.load_resolved_cluster(run_dir)
            placed = placement.place(load_resolved(run_dir), cluster)
            book.record(run_dir, _record(job, run_dir, cluster, placed))
            take_up(script, job)
    # The one before, too: a job may have been put in its place and cancelled while it lives.
    for record in reversed(book.records(run_dir)[-2:]):
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
    if runner is commands.run and shutil.which("sbatch") is None:
        raise CommandMissing("no sbatch here: run this on a login node of the cluster")


def _submit(
    run_dir: Path,
    config: RunConfig,
    cluster: Cluster,
    placed: list[Placement],
    directory: str,
    runner: Runner,
    after: int | None = None,
) -> JobRecord:
    book.write_cluster(run_dir, cluster)
    folder = book.folder(run_dir)
    with rundir.writing(folder):
        folder.mkdir(exist_ok=True)
    executor = _executor(run_dir, config, cluster, placed, directory, runner, after)
    try:
        with rundir.writing(folder):  # its script and its pickle
            submitted = executor.submit(supervise(run_dir))
        record = _record(int(submitted.job_id), run_dir, cluster, placed)
        book.record(run_dir, record)
    except Unconfirmed as error:
        raise Unconfirmed(
            f"{error}\n{run_dir} is kept: hpc-rollart resubmit {shlex.quote(str(run_dir))} takes the job up "
            "if it is there, and submits another if not",
            error.said,
        ) from None
    except BaseException as error:
        # A job that is not on record would be forgotten, and its run submitted again beside it.
        if executor.job_id is not None:
            _take_back(executor.job_id, run_dir, error, runner)
        raise
    return record


def _take_back(job: int, run_dir: Path, why: BaseException, runner: Runner) -> None:
    try:
        runner(["scancel", str(job)])
    except SlurmError as error:
        raise Unconfirmed(
            f"job {job} is in the queue, but could not be noted in {run_dir} ({str(why) or repr(why)}), "
            f"and scancel fails: {error}\nend it with scancel {job}"
        ) from None


def _record(job: int, run_dir: Path, cluster: Cluster, placed: list[Placement]) -> JobRecord:
    folder = book.folder(run_dir)
    return JobRecord(
        job=job,
        submitted=time.time(),
        script=str(script_file(folder, job)),
        log=str(log_file(folder, job)),
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
    after: int | None = None,
) -> HetSlurmExecutor:
    title = [
        f"Run {config.run.name} of hpc_rollart {hpc_rollart.__version__}: one heterogeneous job.",
        f"Directory: {run_dir}",
        "Written by hpc-rollart submit; to submit again, use hpc-rollart resubmit.",
    ]
    return make_executor(
        book.folder(run_dir),
        cluster,
        placed,
        name=config.run.name,
        title=title,
        directory=directory,
        max_requeues=config.launch.max_requeues,
        after=after,
        runner=runner,
    )
