"""Runs a run's attempts inside a Slurm job: starts, watches, restarts on the nodes left, requeues, ends.

This is the batch step's own process, on the first node of the first component. It trains nothing and may be
killed at any time: whatever it knows that must outlive it is in the run directory.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from hpc_rollart.config.cluster import Cluster, python_of
from hpc_rollart.config.load import load_resolved
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.doctor.nodes import short_checks
from hpc_rollart.doctor.results import Finding
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book, events
from hpc_rollart.jobs.commands import SlurmError
from hpc_rollart.launch import sentinel
from hpc_rollart.launch.allocation import Allocation, Group, give_back, job_facts
from hpc_rollart.launch.attempt import Attempt, next_attempt
from hpc_rollart.launch.guard import Guarded
from hpc_rollart.launch.model import ensure_model
from hpc_rollart.launch.nodes import DEADLINE_S, FIRST_DEADLINE_S, check_nodes
from hpc_rollart.launch.processes import end_with_parent
from hpc_rollart.launch.requeue import GO_ON, REPLACED, refusal
from hpc_rollart.launch.rundir import RunDir, amend_manifest, read_manifest
from hpc_rollart.launch.signals import collected
from hpc_rollart.launch.slurm_world import make_launcher
from hpc_rollart.launch.submit import replace
from hpc_rollart.launch.view import close_status, reopen_status
from hpc_rollart.launch.world import Outcome, World

_POLL_S = 0.25
_RECORD_S = 60.0
_ASK_END_EVERY_S = 60.0
_BACKOFF_MAX_S = 60.0
_TELL_EVERY_S = 30.0
# No longer may nodes that are done be held for it.
_REPORT_S = 120.0
# Every site's way to say that the job will end; who sends which is in docs/submitting.md.
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class AnotherJob(UserError):
    """Another job was submitted for the run since this one."""


class Supervise:
    """What the job runs; submitit pickles it, so it holds no more than a path.

    Parameters
    ----------
    run_dir
        Absolute path of the run directory.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> str:
        """Run the job; returns how the run ended, or leaves through submitit's way of requeueing."""
        # What submitit put there requeues the job; it is called once the ranks have stopped.
        number = signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]
        requeue = signal.getsignal(number)
        # Preemption sends SIGCONT before SIGTERM; it means nothing here.
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        with collected(_STOP_SIGNALS) as asked:
            supervisor = Supervisor(Path(self.run_dir), asked)
            try:
                end = supervisor.run()
            except AnotherJob as error:
                print(error, flush=True)  # the run and its records are the other job's
                sys.exit(3)
            except UserError as error:
                end = supervisor.give_up(str(error))
            except Exception as error:
                traceback.print_exc()
                end = supervisor.give_up(f"the supervisor failed: {type(error).__name__}: {error}")
        if end.requeue:
            try:
                if not callable(requeue):
                    raise RuntimeError(f"submitit handles no {number.name} here")
                requeue(number, None)  # exits
            except Exception as error:
                supervisor.say("not requeued", message=f"{error}; {GO_ON}")
                sys.exit(3)
        if end.state == "failed":
            sys.exit(3)
        return end.state

    def checkpoint(self) -> Any:
        """Return what the job runs when it is there again: the same; the ranks' state is in checkpoints/."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class End:
    """How the job ends: in which state, and whether it goes back into the queue."""

    state: str
    message: str = ""
    requeue: bool = False


@dataclass
class Supervisor:
    """The loop over a run's attempts in one job.

    Attributes
    ----------
    run_dir
        Of the run.
    asked
        Signals that asked the job to stop so far.
    lost
        Nodes of the job that are of no use, and why.
    findings
        What the doctor found wrong so far, each said once.
    """

    run_dir: Path
    asked: Sequence[signal.Signals]
    config: RunConfig = field(init=False)
    cluster: Cluster = field(init=False)
    allocation: Allocation = field(init=False)
    lost: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    _checked: bool = False
    _unfit: set[str] = field(default_factory=set)
    _given_back: set[str] = field(default_factory=set)
    _stuck: str = ""
    _end_time: float | None = None
    _end_asked: float = float("-inf")
    _told_step: int = 0
    _told_at: float = float("-inf")

    def run(self) -> End:
        """Supervise until the run is done, has failed, or the job has to go.

        Raises
        ------
        UserError
            The run cannot start at all.
        """
        self.config = load_resolved(self.run_dir)
        self.cluster = book.load_resolved_cluster(self.run_dir)
        manifest = read_manifest(self.run_dir)
        run = RunDir(self.run_dir, manifest["run_id"])
        self.allocation = Allocation.of_this_job(self.config)
        self._refuse_another_job()
        if idle := self._idle_jobs():
            return self.give_up(idle)
        self._note_job()
        first = self.allocation.groups[0]
        python = python_of(self.cluster)
        with (
            sentinel.watching(self.allocation.job_id, first.index, first.hosts[0], python),
            Guarded(self.run_dir, self.allocation, python) as guarded,
        ):
            guarded.on(self.allocation)
            return self._attempts(run, guarded, bool(manifest.get("model_dir")))

    def _attempts(self, run: RunDir, guarded: Guarded, has_model: bool) -> End:
        """Start one attempt after another until one of them is the last."""
        failures = 0
        while True:
            nodes_left = self._nodes_left()
            if self._stuck:
                return self._start_anew(self._stuck)
            if short := self._short_of_nodes(nodes_left):
                missing = self._why_short(short)
                # Nodes that answer and are not as promised will be so in the next job too.
                return self.give_up(missing) if short in self._unfit else self._start_anew(missing)
            guarded.on(nodes_left)
            if not has_model:
                try:
                    ensure_model(self.config, self.run_dir, Console(no_color=True))
                except KeyboardInterrupt:  # a signal to the whole step ended it
                    return self._leave("asked to stop while the model was made")
                has_model = True
            attempt = next_attempt(self.run_dir, self.config, self._shrunk(nodes_left))
            outcome = self._attempt(run, attempt, nodes_left)
            if outcome.state == "done":
                self.say("done", attempt=attempt.number)
                self._write_report()
                return End("done")
            if outcome.state == "interrupted":
                return self._leave(outcome.message)
            self.say("attempt failed", attempt=attempt.number, message=outcome.message)
            if self._stuck:
                return self._start_anew(self._stuck)
            if reason := self._reason_to_stop():  # what failed is the stop in good order
                return self._leave(reason)
            after = next_attempt(self.run_dir, self.config)
            failures = 1 if after.step > attempt.step else failures + 1
            restart = self.config.launch.restart
            if failures > restart.attempts:
                last = outcome.message.splitlines()[0]
                return self.give_up(
                    f"{failures} attempts in a row failed without getting a checkpoint further "
                    f"(launch.restart.attempts: {restart.attempts}); the last: {last}"
                )
            if not self._pause(min(restart.backoff_s * 2 ** (failures - 1), _BACKOFF_MAX_S)):
                return self._leave("asked to stop between two attempts")

    # --- one attempt -------------------------------------------------------------------------------

    def _attempt(self, run: RunDir, attempt: Attempt, allocation: Allocation) -> Outcome:
        """Run one world to its end; the first reason to stop is passed on to the ranks."""
        config = attempt.effective(self.config)
        if attempt.passed_over:
            self.say("checkpoint passed over", message=attempt.passed_over)
        self.say("attempt starts", attempt=attempt.number, step=attempt.step, nodes=list(allocation.hosts))
        stopped, looked = "", False
        launcher = make_launcher(config, self.cluster, allocation, run, attempt)
        with World(self.config, run, attempt, launcher) as world:
            while (outcome := world.poll()) is None:
                if not stopped and (stopped := self._reason_to_stop()):
                    self.say("stopping", attempt=attempt.number, message=stopped)
                    world.stop()
                if world.failing and not looked:
                    # At once: a lost node must be out of the job before Slurm takes it for down.
                    looked = True
                    if set(self._nodes_left().hosts) != set(allocation.hosts):
                        world.abandon()
                self._tell_progress(world.status)
                time.sleep(_POLL_S)
            if outcome.state == "failed":
                first_line = outcome.message.splitlines()[0]
                reopen_status(self.run_dir, f"attempt {attempt.number} failed: {first_line}")
                if not looked:
                    self._nodes_left()
        return outcome if outcome.message else Outcome(outcome.state, stopped)

    def _tell_progress(self, status: dict[str, Any]) -> None:
        """Print how far the run is for those who follow the log, not too often."""
        step = status.get("step", 0)
        if step == self._told_step or time.monotonic() < self._told_at + _TELL_EVERY_S:
            return
        self._told_step, self._told_at = step, time.monotonic()
        tasks = status.get("tasks", {})
        means = [
            f"{name} {task['reward']:.3f}" for name, task in tasks.items() if task.get("reward") is not None
        ]
        rewards = f", reward {', '.join(means)}" if means else ""
        self._print(f"step {step} of {status.get('steps', '?')}{rewards}")

    def _reason_to_stop(self) -> str:
        """Return why the ranks should stop now, or nothing."""
        if self.asked:
            return f"received {self.asked[-1].name}"
        self._look_at_end()
        lead = self.config.launch.stop_lead_s
        if self._end_time is not None and time.time() > self._end_time - lead:
            left = max(0.0, self._end_time - time.time())
            return f"the job ends in {left:.0f} s (launch.stop_lead_s: {lead:g})"
        return ""

    def _look_at_end(self) -> None:
        """Ask Slurm when the job ends, now and then: its limit may be changed while it runs."""
        if time.monotonic() < self._end_asked + _ASK_END_EVERY_S:
            return
        self._end_asked = time.monotonic()
        with contextlib.suppress(SlurmError):  # a controller that is away says nothing; asked again later
            self._end_time = job_facts(self.allocation.job_id).end_time

    # --- nodes -------------------------------------------------------------------------------------

    def _nodes_left(self) -> Allocation:
        """Look at every node of the job, and return the allocation without those that do not answer."""
        deadline_s = DEADLINE_S if self._checked else FIRST_DEADLINE_S
        reports = check_nodes(self.config, self.cluster, self.allocation, self.run_dir, deadline_s=deadline_s)
        self._checked = True
        if silent := [r.host for r in reports if not r.answered and r.host not in self.lost]:
            # Asked once more, as what is given back is gone: a file system may have stood still for a moment.
            again = check_nodes(self.config, self.cluster, self.allocation.only(silent), self.run_dir)
            second = {report.host: report for report in again}
            reports = [second.get(report.host, report) for report in reports]
        self._unfit = {report.component for report in reports if report.answered and report.problem}
        for report in reports:
            if not report.usable and report.host not in self.lost:
                self.say("node lost", host=report.host, message=report.problem)
        for finding in short_checks([r for r in reports if r.answered], self.config, self.cluster):
            if finding not in self.findings:
                self.findings.append(finding)
                self.say(finding.check, where=finding.where, message=finding.text, mend=finding.mend)
        self.lost = {r.host: r.problem for r in reports if not r.usable}
        left = self.allocation.without(list(self.lost))
        for group, rest in zip(self.allocation.groups, left.groups, strict=True):
            gone = [r.host for r in reports if r.host in group.hosts and not r.answered]
            if rest.hosts and not self._given_back.issuperset(gone):
                self._give_back(group, rest.hosts)
                self._given_back.update(gone)
        return left

    def _give_back(self, group: Group, left: tuple[str, ...]) -> None:
        try:
            give_back(group, left, book.folder(self.run_dir))
        except SlurmError as error:
            # Slurm does not let go of a component's first node, and breaks the job apart once it takes it for
            # down.
            gone = ", ".join(host for host in group.hosts if host not in left)
            self._stuck = f"node {gone} of component {group.component} is lost and stays in the job ({error})"
            self.say("lost nodes stay in the job", hosts=gone, message=str(error))

    def _short_of_nodes(self, left: Allocation) -> str:
        """Return the component that keeps an attempt from starting on the nodes left, or nothing."""
        for group in left.groups:
            if not group.hosts or (group.component == self._coordinator() and self._too_few(group.hosts)):
                return group.component
        return ""

    def _why_short(self, component: str) -> str:
        whole = next(group for group in self.allocation.groups if group.component == component)
        why = "; ".join(f"{host}: {self.lost[host]}" for host in whole.hosts if host in self.lost)
        role = self.config.components[component].role
        return f"component {component} ({role}) has too few nodes left: {why}"

    def _coordinator(self) -> str:
        return next(name for name, part in self.config.components.items() if part.role == "env")

    def _too_few(self, hosts: tuple[str, ...]) -> bool:
        return len(hosts) * self.config.components[self._coordinator()].ranks_per_node < 2

    def _shrunk(self, left: Allocation) -> dict[str, int]:
        return {
            group.component: len(group.hosts)
            for group in left.groups
            if len(group.hosts) < self.config.components[group.component].nodes
        }

    # --- ends --------------------------------------------------------------------------------------

    def _leave(self, message: str) -> End:
        """End this job in good order before the run is done: back into the queue if that is allowed."""
        problem = refusal(self.run_dir, self.config, self.cluster, self.allocation)
        if problem:
            self.say("ends", message=problem)
            close_status(self.run_dir, "interrupted", message)
            return End("interrupted", problem)
        self.say("requeued", message=message)
        return End("interrupted", message, requeue=True)

    def _start_anew(self, message: str) -> End:
        """Leave lost nodes behind: another job takes this one's place.

        A job that is requeued with a dead node comes back without its GPUs, if Slurm takes the node for down
        before it has cleared up there (seen with 22.05).
        """
        problem = refusal(self.run_dir, self.config, self.cluster, self.allocation)
        if not problem:
            try:
                job = replace(self.run_dir, int(self.allocation.job_id)).job
            except UserError as error:
                problem = f"{error}; {GO_ON}"
            else:
                self.say(REPLACED, by=job, message=message)
                return End("interrupted", message)
        return self.give_up(f"{message}; {problem}")

    def give_up(self, message: str) -> End:
        """Put on record that the run has failed."""
        self.say("failed", message=message)
        close_status(self.run_dir, "failed", message)
        return End("failed", message)

    # --- records -----------------------------------------------------------------------------------

    def _write_report(self) -> None:
        line = [sys.executable, "-m", "hpc_rollart", "report", str(self.run_dir)]
        try:
            subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=_REPORT_S,
                check=True,
                preexec_fn=end_with_parent,
            )
        except subprocess.SubprocessError as error:
            reason = "it takes too long" if isinstance(error, subprocess.TimeoutExpired) else "see above"
            self._print(f"no report.html ({reason}); hpc-rollart report writes it")

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; False if the job is asked to stop meanwhile."""
        until = time.monotonic() + seconds
        while not self._reason_to_stop():
            if time.monotonic() >= until:
                return True
            time.sleep(_POLL_S)
        return False

    def _refuse_another_job(self) -> None:
        """Refuse to run if another job was submitted for the run since: two would write the same files.

        Raises
        ------
        AnotherJob
            The newest record in jobs.jsonl is not this job, even a while after it began.
        """
        end = time.monotonic() + _RECORD_S  # it is written when sbatch has answered
        while (records := book.records(self.run_dir)) and time.monotonic() < end:
            if str(records[-1].job) == self.allocation.job_id:
                return
            time.sleep(1.0)
        if records:
            raise AnotherJob(
                f"job {self.allocation.job_id} is not the run's newest, which is {records[-1].job}; "
                "it does nothing"
            )

    def _idle_jobs(self) -> str:
        """Return that the jobs before this one got nothing done, if that was so too often."""
        step = next_attempt(self.run_dir, self.config).step
        begun = (e for e in events.newest_first(self.run_dir) if e.event == "job starts")
        idle = len(list(itertools.takewhile(lambda event: event.step == step, begun)))
        limit = self.config.launch.restart.attempts
        # A job that the user has submitted begins in any case.
        by_itself = self.allocation.restarts or any(
            event.event == REPLACED and str(event.by) == self.allocation.job_id
            for event in events.newest_first(self.run_dir)
        )
        if idle <= limit or not by_itself:
            return ""
        return (
            f"{idle} jobs in a row began at step {step} and got no checkpoint further "
            f"(launch.restart.attempts: {limit}); give them more time, or look at their logs"
        )

    def _note_job(self) -> None:
        job = {"job_id": self.allocation.job_id, "cluster": os.environ.get("SLURM_CLUSTER_NAME")}
        amend_manifest(self.run_dir, slurm=job)
        groups = {group.component: list(group.hosts) for group in self.allocation.groups}
        step = next_attempt(self.run_dir, self.config).step
        self.say("job starts", restarts=self.allocation.restarts, step=step, nodes=groups)

    def say(self, what: str, **more: Any) -> None:
        """Print an event for the batch log and keep it in RUN/slurm/events.jsonl."""
        try:
            events.write(self.run_dir, what, **more)
        except OSError as error:  # a full disk must not end a run that may still save itself
            print(f"cannot write {events.EVENTS_FILE}: {error.strerror}", flush=True)
        details = "".join(f", {name} {_plain(value)}" for name, value in more.items())
        self._print(what + details)

    @staticmethod
    def _print(text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
