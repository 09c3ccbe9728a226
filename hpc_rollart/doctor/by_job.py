"""The doctor on a login node: what can be told there, then a short job of the run's shape that looks on."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

import hpc_rollart
from hpc_rollart.config.cluster import Cluster, Signal
from hpc_rollart.config.load import load_resolved
from hpc_rollart.config.problem import ConfigError
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.doctor import here, results
from hpc_rollart.doctor.examine import Say, examine_job, temporary_run
from hpc_rollart.doctor.results import Finding, from_line, from_lines
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book, commands
from hpc_rollart.jobs.commands import Runner, SlurmError
from hpc_rollart.jobs.queue import Phase, Queue
from hpc_rollart.jobs.reasons import explain_reason
from hpc_rollart.launch import placement, sitecheck
from hpc_rollart.launch.allocation import Allocation, AllocationError
from hpc_rollart.launch.placement import Placement
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.slurm import HetSlurmExecutor, log_file, make_executor
from hpc_rollart.launch.view import last_lines

FINDINGS = "findings.json"
JOB_LIMIT_S = 300.0
# Time for the nodes' part of the checks and for leaving, of the job's limit.
_WORLD_LIMIT_S = 180.0
_POLL_S = 0.5
# Files of another node show here with a delay, on a network file system of up to half a minute.
_SHOWS_WITHIN_S = 20.0
_END_WAIT_S = 40.0
# Slurm starts and ends jobs with some delay.
_LATE_S = 120.0
_USELESS = ("down", "drain", "fail", "unk", "maint", "no_respond")


class Doctor:
    """What the job runs; pickled by name.

    Parameters
    ----------
    run_dir
        The doctor's own directory, with the run's config and the profile in it.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> str:
        """Look at the job's nodes and write what was found; returns the verdict."""
        began = time.monotonic()
        # scancel: leave through the world's clean-up, not on the spot.
        signal.signal(signal.SIGTERM, _interrupt)
        path = Path(self.run_dir)
        findings = examine_this_job(path, lambda text: print(text, flush=True))
        results.write(path / FINDINGS, findings)
        results.show(findings, "these nodes", Console(), time.monotonic() - began)
        return results.verdict(findings)


def examine_this_job(run_dir: Path, say: Say) -> list[Finding]:
    """Examine the job that this process is in, with the config and profile in `run_dir`."""
    config, cluster = load_resolved(run_dir), book.load_resolved_cluster(run_dir)
    try:
        allocation = Allocation.of_this_job(config)
    except AllocationError as error:
        return [from_line("job", os.environ.get("SLURM_JOB_ID", "none"), str(error))]
    hosts = ", ".join(allocation.hosts[:6]) + (" ..." if len(allocation.hosts) > 6 else "")
    first = Finding("job", allocation.job_id, "ok", f"{len(allocation.hosts)} nodes: {hosts}")
    return [first, *examine_job(config, cluster, allocation, RunDir(run_dir, run_dir.name), say)]


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def inside_job(config: RunConfig) -> bool:
    """Return whether this process is in a Slurm job whose nodes fit the config."""
    if not os.environ.get("SLURM_JOB_ID"):
        return False
    try:
        Allocation.of_this_job(config)
    except AllocationError:
        return False
    return True


def examine_inside(config: RunConfig, cluster: Cluster, say: Say = lambda _: None) -> list[Finding]:
    """Find out whether a run would start in the job that this process is in."""
    found = here.configuration(config, here=False)
    found += here.storage(config)
    found += here.model(config)
    with temporary_run(_bounded(config)) as (_, run):
        book.write_cluster(run.path, cluster)
        return found + examine_this_job(run.path, say)


@dataclass(frozen=True)
class Wait:
    """How long the job is waited for, and who is told meanwhile.

    Attributes
    ----------
    limit_s
        Of waiting in the queue; once it runs the job's own limit counts.
    """

    limit_s: float
    say: Say


def examine_cluster(
    config: RunConfig,
    cluster: Cluster,
    wait: Wait,
    *,
    shared: bool = False,
    runner: Runner = commands.run,
) -> list[Finding]:
    """Find out whether `hpc-rollart submit` would start the run: from here, and by a short job.

    Parameters
    ----------
    config, cluster
        Config whose start was not checked, and the profile with what the command line chose.
    shared
        Whether all nodes see the paths though they look local.
    """
    wait.say("looking at the profile and at Slurm's partitions")
    found = from_login(config, cluster, shared=shared, runner=runner)
    if results.verdict(found) == "fail":
        return [*found, Finding("job", "all nodes", "skipped", "not submitted: mend the above first")]
    return found + _by_job(config, cluster, wait, runner)


def from_login(
    config: RunConfig, cluster: Cluster, *, shared: bool = False, runner: Runner = commands.run
) -> list[Finding]:
    """Return what can be told without a job."""
    found = here.configuration(config, here=False)
    if not cluster.tested:
        text = "written from public documentation; nobody has run it there"
        mend = "compare it with the site's pages; then set tested: true"
        found.append(Finding("profile", cluster.description[:60], "warn", text, mend))
    try:
        placed = placement.place(config, cluster)
    except ConfigError as error:
        return found + from_lines("placement", "profile", error.lines)
    where = ", ".join(f"{part.component} {part.nodes}" for part in placed)
    found.append(Finding("placement", "profile", "ok", f"fits; nodes: {where}"))
    path = Path(config.run.dir).expanduser().absolute()
    wrong = sitecheck.paths(config, cluster, path, shared=shared)
    found += from_lines("paths", "login node", wrong)
    found += here.storage(config)
    if config.model.path is not None:
        found += here.model(config)
    if not wrong:
        found.append(Finding("paths", "login node", "ok", "none is known to be local to a node"))
    account = {str(part.options.get("account", "")) for part in placed}
    said = ", ".join(sorted(account - {""})) or "none: your default one"
    found.append(Finding("account", "Slurm", "ok", said))
    try:
        found += from_lines("partitions", "Slurm", sitecheck.partitions(placed, cluster, runner))
        found += nodes_up(placed, runner)
    except SlurmError as error:
        found.append(from_line("Slurm", "login node", str(error)))
    return found


def nodes_up(placed: Sequence[Placement], runner: Runner) -> list[Finding]:
    """Whether each partition has as many nodes at work as the run needs there."""
    out = []
    needed: Counter[str] = Counter()
    for part in placed:
        if part.site_partition and "," not in part.site_partition:
            needed[part.site_partition] += part.nodes
    for name, count in needed.items():
        said = runner(["sinfo", "--noheader", f"--partition={name}", "--format=%D|%T"])
        states: Counter[str] = Counter()
        for line in said.splitlines():
            number, bar, state = line.partition("|")
            if bar and number.strip().isdecimal():
                states[state.strip().lower()] += int(number)
        up = sum(n for state, n in states.items() if not any(bad in state for bad in _USELESS))
        idle = sum(n for state, n in states.items() if state.startswith("idle"))
        text = f"{up} nodes up, {idle} idle, {count} needed"
        if up < count:
            mend = "ask for fewer nodes, or wait until sinfo shows more up"
            out.append(Finding("partition", name, "warn", text, mend))
        else:
            out.append(Finding("partition", name, "ok", text))
    return out


# --- the job -----------------------------------------------------------------------------------------


def short(cluster: Cluster) -> Cluster:
    """Return the profile as the doctor's job uses it: five minutes, no warning signal, no requeueing."""
    once = Signal(name=cluster.signal.name, request=False)
    update = {"time": min(JOB_LIMIT_S, cluster.time), "requeue": False, "signal": once}
    return cluster.model_copy(update=update)


def _by_job(config: RunConfig, cluster: Cluster, wait: Wait, runner: Runner) -> list[Finding]:
    """Submit, wait, read what it found; leaves nothing unless it says where."""
    folder: Path | None = None
    try:
        with temporary_run(_bounded(config), keep_on=_Failed) as (small, run):
            folder = run.path
            findings = _submit_and_wait(small, short(cluster), run, wait, runner)
            # Without a log of the batch step there was no job, and nothing to read.
            if results.verdict(findings) == "fail" and any(book.folder(folder).glob("*.out")):
                raise _Failed(findings)
            return findings
    except _Failed as failed:
        kept = Finding(results.KEPT, str(folder), "skipped", "the job's logs are kept")
        return [*failed.findings, kept]


class _Failed(Exception):
    """Carries findings out, so that the folder stays."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__()
        self.findings = findings


def _submit_and_wait(
    config: RunConfig, cluster: Cluster, run: RunDir, wait: Wait, runner: Runner
) -> list[Finding]:
    book.write_cluster(run.path, cluster)
    folder = book.folder(run.path)
    folder.mkdir(exist_ok=True)
    submitting = executor(config, cluster, run.path, runner)
    try:
        job = int(submitting.submit(Doctor(str(run.path))).job_id)
    except UserError as error:
        return [from_line("sbatch", "login node", str(error))]
    try:
        if submitting.interrupted:
            raise KeyboardInterrupt
        found = _wait(job, run.path, wait, runner)
    except BaseException:
        _cancel(job, runner)
        raise
    return found


def executor(config: RunConfig, cluster: Cluster, run_dir: Path, runner: Runner) -> HetSlurmExecutor:
    """Return what submits the job: as a run's, but short, and without a second life."""
    title = [
        f"Looks whether run {config.run.name} would start: one short heterogeneous job of its shape.",
        f"Written by hpc-rollart doctor {hpc_rollart.__version__}.",
    ]
    return make_executor(
        book.folder(run_dir),
        cluster,
        # It is over before any run would have to stop, and its limit is its own.
        placement.place(config, cluster, stops=False),
        name=f"doctor-{config.run.name}",
        title=title,
        directory=str(run_dir),
        max_requeues=0,
        runner=runner,
    )


def _wait(job: int, run_dir: Path, wait: Wait, runner: Runner) -> list[Finding]:
    """Wait until the job has written what it found, and has gone."""
    queue = Queue(job, runner)
    began = time.monotonic()
    ended: float | None = None
    state, reason = Phase.WAITING, ""
    while not (run_dir / FINDINGS).exists():
        now = time.monotonic()
        with contextlib.suppress(SlurmError):  # a controller that is busy says nothing about the job
            status = queue.state()
            state = status.phase
            reason = next((part.reason for part in status.parts if part.reason), "")
        words = f" ({reason}: {explain_reason(reason)})" if reason and state is Phase.WAITING else ""
        wait.say(f"job {job} is {state.value}{words}")
        if state is Phase.WAITING and now > began + wait.limit_s:
            _cancel(job, runner)
            text = f"still pending after {wait.limit_s:g} s{words}; cancelled"
            mend = "wait longer with --wait, or ask for what is idle: sinfo shows it"
            return [Finding("job", str(job), "fail", text, mend)]
        if state is Phase.ENDED:
            ended = ended or now
            os.scandir(run_dir).close()  # makes a network file system look again
            if now > ended + _SHOWS_WITHIN_S:
                return [_died(job, run_dir, queue)]
        if now > began + wait.limit_s + JOB_LIMIT_S + _LATE_S:
            _cancel(job, runner)
            text = f"no word of it {now - began:.0f} s after it was submitted; cancelled"
            return [Finding("job", str(job), "fail", text, "look at squeue; does Slurm's controller answer?")]
        time.sleep(_POLL_S)
    findings = results.read(run_dir / FINDINGS)
    wait.say(f"job {job} is done; waiting until it has gone")
    _gone(queue)
    return findings


def _died(job: int, run_dir: Path, queue: Queue) -> Finding:
    how = ""
    with contextlib.suppress(SlurmError):
        how = queue.state().ended_as
    lines = last_lines(log_file(book.folder(run_dir), job), 6)
    text = f"ended {how or 'early'} without a word of its checks"
    text += f"; its log ends: {' / '.join(lines)}" if lines else "; it has no log"
    mend = "see that the profile's python, modules and setup work on the first component's nodes"
    return Finding("job", str(job), "fail", text[:900], mend)


def _cancel(job: int, runner: Runner) -> None:
    """Cancel the job and wait until it has gone, so that nobody writes into its folder any more."""
    with contextlib.suppress(SlurmError):
        runner(["scancel", str(job)])
    _gone(Queue(job, runner))


def _gone(queue: Queue) -> None:
    until = time.monotonic() + _END_WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(SlurmError):
            if not queue.state().there:
                return
        time.sleep(_POLL_S)


def _bounded(config: RunConfig) -> RunConfig:
    """Return the config as the doctor's job runs it: within its limit, with paths that hold anywhere."""
    limit = min(config.launch.start_deadline_s, _WORLD_LIMIT_S)
    launch = config.launch.model_copy(update={"start_deadline_s": limit})
    model = config.model
    if model.path is not None:
        model = model.model_copy(update={"path": str(Path(model.path).expanduser().absolute())})
    return config.model_copy(update={"launch": launch, "model": model})
