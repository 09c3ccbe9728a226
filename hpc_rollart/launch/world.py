"""One running MPI world: watches it, stops it, and leaves nothing of it behind, however it was started."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Protocol, Self

from hpc_rollart.config.layout import world_size
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.coordinate.life import LifeSigns
from hpc_rollart.launch import processes
from hpc_rollart.launch import scratch as scratches
from hpc_rollart.launch.attempt import Attempt, logs
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.view import RunView, close_status, failure_text, last_lines
from hpc_rollart.observe.status import read_status

RANK_MODULE = "hpc_rollart.launch.rank"
# What the launcher waits beyond the coordinator's own deadlines, whose errors name the rank at fault.
_MARGIN_S = 30.0
# After the run's end, good or bad, is on record the ranks leave; whoever has not by then is ended.
_LEAVE_GRACE_S = 45.0
_TERM_GRACE_S = 5.0
_LOST_NODE = re.compile(r"Remote daemon: .* on node (\S+)")


class Launcher(Protocol):
    """How the ranks of a world are started: one process here that all of them hang on.

    Attributes
    ----------
    scratch
        Node-local directory in which this node's scratch directory is made.
    """

    scratch: Path

    def command(self, config: RunConfig, rank_command: list[str]) -> list[str]:
        """Return the command line that starts all ranks, in rank order, and ends when they have ended."""

    def environment(self, run_id: str, scratch: Path, shared_memory: Path) -> dict[str, str]:
        """Return the command's environment."""

    def started(self, pid: int) -> None:
        """Do what is to be done once the command runs, without waiting for it."""

    def end(self) -> None:
        """End what is left of the world on other machines; called when the command has ended."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `message` says why unless it is done."""

    state: Literal["done", "interrupted", "failed"]
    message: str = ""


class World:
    """One running MPI world; use as a context manager, so that nothing outlives it.

    Parameters
    ----------
    config
        Resolved config.
    run
        Its directory, already made.
    attempt
        Which start of it this is.
    launcher
        How the ranks are started.
    rank_module
        Module that each rank runs as `python -m MODULE RUN_DIR ATTEMPT`.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        attempt: Attempt,
        launcher: Launcher,
        rank_module: str = RANK_MODULE,
    ) -> None:
        self._config, self._run, self._attempt = attempt.effective(config), run, attempt
        self._launcher = launcher
        attempt.write(run.path)
        self._logs = logs(run.path, attempt.number)
        self._view = RunView(run.path)
        # What it says may be seen late: names of files are cached for up to half a minute on NFS.
        self._life = LifeSigns(self._config.launch.heartbeat_s + _MARGIN_S)
        self._reported: float | None = None
        self._coordinator = next(n for n, part in self._config.components.items() if part.role == "env")
        rank = [sys.executable, "-m", rank_module, str(run.path), str(attempt.number)]
        self._command = launcher.command(self._config, rank)
        self._cleanup = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._over_at: float | None = None
        self._ending = ""  # why the launcher itself ends the world; empty while it does not
        self._term_at = self._kill_at = float("inf")
        self.stopping = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            name = scratches.name_for(self._run.run_id, self._attempt.number)
            scratch, shared = stack.enter_context(
                scratches.held(self._launcher.scratch, self._run.run_id, name)
            )
            # Before the scratch directories go, everybody who may write there must be gone.
            stack.callback(processes.end_all, self._run.run_id, grace_s=1.0)
            stack.callback(self._launcher.end)
            log: IO[bytes] = stack.enter_context(open(self._logs / "mpirun.log", "ab"))
            self._process = subprocess.Popen(
                self._command,
                env=self._launcher.environment(self._run.run_id, scratch, shared),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches this program only, which then asks the ranks to stop.
                start_new_session=True,
                preexec_fn=processes.end_with_parent,
            )
            self._launcher.started(self._process.pid)
            self._started = time.monotonic()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_GRACE_S)
        self._cleanup.close()
        if process is not None:
            process.wait(_TERM_GRACE_S)

    def stop(self) -> None:
        """Ask the ranks to end in good order; asked again, end them at once."""
        now = time.monotonic()
        self._look()
        ready = self._view.state in ("running", "stopping")
        if self.stopping or not ready:
            # A rank that is still starting has no handler for the polite signal and holds nothing to save.
            self._term_at, self._kill_at = now, now + _TERM_GRACE_S
        else:
            self._signal(signal.SIGUSR1)  # mpirun passes it on to every rank
            self._term_at = now + self._config.stop_deadline_s + _MARGIN_S
            self._kill_at = self._term_at + _TERM_GRACE_S
        self.stopping = True

    def abandon(self) -> None:
        """End the ranks that are left at once: some of them are on nodes that nobody reaches."""
        self._term_at = time.monotonic()
        self._kill_at = self._term_at + _TERM_GRACE_S

    @property
    def status(self) -> dict[str, Any]:
        """Content of status.json as of the last `poll`; empty before there is one."""
        return self._view.status

    @property
    def failing(self) -> bool:
        """Whether a failure is on record and the ranks are only leaving."""
        return (self._logs / "failure.json").exists()

    def poll(self) -> Outcome | None:
        """Return how the world ended, or None while it lives; also enforces every deadline."""
        assert self._process is not None, "use World as a context manager"
        code = self._process.poll()
        if code is not None:
            return self._outcome(code)
        now = time.monotonic()
        if not self._ending:
            self._ending = self._overdue(now)
            if self._ending:
                self._term_at, self._kill_at = now, now + _TERM_GRACE_S
        if now >= self._kill_at:
            self._kill_at = float("inf")
            os.killpg(self._process.pid, signal.SIGKILL)
            processes.end_all(self._run.run_id, grace_s=0.0)
        elif now >= self._term_at:
            self._term_at = float("inf")
            self._signal(signal.SIGTERM)
        return None

    def _overdue(self, now: float) -> str:
        """Return which deadline the world has missed, or nothing."""
        launch = self._config.launch
        self._look()
        if self._view.final or self.failing:
            self._over_at = self._over_at or now
            return "ranks did not leave" if now > self._over_at + _LEAVE_GRACE_S else ""
        if self._view.state in ("", "starting") and now > self._started + launch.start_deadline_s + _MARGIN_S:
            return (
                f"the {world_size(self._config)} ranks were not all at work after "
                f"{launch.start_deadline_s:.0f} s (launch.start_deadline_s)"
            )
        if self._life.silent(now) and self._view.state in ("running", "stopping"):
            return (
                f"the coordinator (component {self._coordinator}) has not reported for "
                f"{launch.heartbeat_s + _MARGIN_S:.0f} s (launch.heartbeat_s and {_MARGIN_S:.0f} s more)"
            )
        return ""

    def _outcome(self, code: int) -> Outcome:
        self._look()
        state, failure = self._view.state, failure_text(self._run.path, self._attempt.number)
        if state == "done" and code == 0:
            return Outcome("done")
        if not failure and (state == "interrupted" or self.stopping):
            outcome = Outcome("interrupted", self._view.message)
        elif state == "done":
            outcome = Outcome(
                "failed",
                "all steps were done, but then "
                + (self._ending or f"{Path(self._command[0]).name} ended with code {code}"),
            )
        else:
            outcome = Outcome(
                "failed", failure or self._ending or self._view.failed_message or self._why(code)
            )
        close_status(self._run.path, outcome.state, outcome.message)
        return outcome

    def _look(self) -> None:
        """Read status.json alone; metrics are nothing that a run may end for."""
        self._view.status = read_status(self._run.path) or self._view.status
        if (reported := self._view.status.get("t")) != self._reported:
            self._reported = reported
            self._life.heard(0)

    def _why(self, code: int) -> str:
        log = self._logs / "mpirun.log"
        lines = last_lines(log, 12)
        if lost := _LOST_NODE.findall("\n".join(lines)):
            return f"node {', '.join(sorted(set(lost)))} was lost: mpirun's daemon there is gone; see {log}"
        said = "\n  ".join(["; it said:", *lines]) if lines else ""
        return f"{Path(self._command[0]).name} ended with code {code} and no rank said why; see {log}{said}"

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
