"""Watches the supervisor's node from another one: when it dies, another job takes this one's place.

The supervisor dies with its node. Once Slurm takes that node for down it breaks the job apart: components of
one node are requeued alone and the others keep their nodes for nothing (docs/decisions.md). Before that
somebody else has to see to it that the run goes on. Run as a step on the last node of the job as
``python -m hpc_rollart.launch.guard RUN_DIR JOB_ID RESTARTS GROUP HOST TOKEN``, where GROUP and HOST are the
supervisor's and TOKEN is in every sign of life that it gives.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from hpc_rollart.config.load import load_resolved
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book, commands, events
from hpc_rollart.launch.agent import step_command, step_environment
from hpc_rollart.launch.allocation import Allocation, job_facts
from hpc_rollart.launch.requeue import GO_ON, REPLACED, forbidden
from hpc_rollart.launch.side_step import SideStep
from hpc_rollart.launch.slurm import Unconfirmed
from hpc_rollart.launch.submit import replace
from hpc_rollart.launch.view import close_status

_BEAT_S = 5.0
# Longer than a shared file system stands still now and then. Only then is the node itself asked. All of it
# together is well below Slurm's SlurmdTimeout, 300 s where the site has not changed it.
_SILENT_S = 30.0
_ANSWER_S = 20.0
_AGAIN_S = 10.0
# So long is Slurm asked for the job, whose controller is slow when nodes die.
_INSIST_S = 180.0


class Guarded:
    """Shows signs of life and keeps a guard on the job's last node while the context is open.

    Parameters
    ----------
    run_dir, allocation
        The run and its job, as it begins.
    python
        Python of the nodes.
    """

    def __init__(self, run_dir: Path, allocation: Allocation, python: str) -> None:
        first = allocation.groups[0]
        self._own, self._path = first.hosts[0], _file(run_dir)
        self._token = f"{self._own}-{os.getpid()}-{allocation.restarts}"
        self._command = [python, "-m", "hpc_rollart.launch.guard", str(run_dir), allocation.job_id]
        self._command += [str(allocation.restarts), str(first.index), self._own, self._token]
        self._step: SideStep | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs of life", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def on(self, left: Allocation) -> None:
        """Have a guard on one of the nodes that are left; in a job of one node there is none that could."""
        if self._step is not None and (self._step.over or self._step.host not in left.hosts):
            self._step.end()
            self._step = None
        last = left.groups[-1]
        if self._step is None and last.hosts[-1] != self._own:
            self._step = SideStep("guard", left.job_id, last.index, last.hosts[-1], self._command)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._step is not None:
            self._step.end()
        self._done.set()
        self._thread.join(10.0)  # on a file system that hangs it may never end

    def _beat(self) -> None:
        # A full disk is no sign of death: the guard then asks the node itself.
        while True:
            with contextlib.suppress(OSError):
                self._path.write_text(f"{self._token} {time.time()}\n", encoding="utf-8")
            if self._done.wait(_BEAT_S):
                break
        with contextlib.suppress(OSError):
            self._path.unlink()


def _file(run_dir: Path) -> Path:
    return book.folder(run_dir) / "alive"


# --- on the other node -------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Watch until the supervisor takes its leave, or its node is gone."""
    run_dir, job_id, restarts, group, host, token = Path(argv[0]), *argv[1:]
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to every step; they are for the ranks
    os.environ["SLURM_JOB_ID"] = job_id  # of the whole, for the record
    problem = _problem(run_dir, int(restarts))
    last, since = "", time.monotonic()
    while True:
        time.sleep(_BEAT_S)
        said = _read(_file(run_dir), last)
        now = time.monotonic()
        if said is None or token not in said:
            return  # it has left, or another one leads the job
        if said != last:
            last, since = said, now
        elif now > since + _SILENT_S:
            if _gone(job_id, int(group), host):
                _bring_back(run_dir, job_id, host, _problem(run_dir, int(restarts)) or problem)
                return
            since = time.monotonic()


def _read(path: Path, last: str) -> str | None:
    """Return the newest sign of life; None where there is no file any more."""
    try:
        return path.read_text(encoding="utf-8") or last  # empty while it is being written
    except FileNotFoundError:
        return None
    except OSError:
        return last


def _problem(run_dir: Path, restarts: int) -> str:
    """Return why no other job may come, or nothing, also where the run's files cannot be read."""
    with contextlib.suppress(UserError):
        cluster = book.load_resolved_cluster(run_dir)
        return forbidden(run_dir, load_resolved(run_dir), cluster, restarts)
    return ""


def _gone(job_id: str, group: int, host: str) -> bool:
    """Whether the node does not answer though Slurm does, which could run nothing without its controller."""
    for wait in (0.0, _AGAIN_S):
        if _answers(job_id, group, host, wait):
            return False
    return _slurm_answers(job_id) and not _answers(job_id, group, host, 0.0)


def _answers(job_id: str, group: int, host: str, wait: float) -> bool:
    """Whether Slurm can run a program on the node, one that needs no shared file system."""
    time.sleep(wait)
    line = [*step_command(job_id, group, host, 1, "answer"), "--chdir=/", "/bin/true"]
    with subprocess.Popen(
        line,
        env=step_environment(dict(os.environ), job_id),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            return process.wait(_ANSWER_S) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return False


def _slurm_answers(job_id: str) -> bool:
    try:
        job_facts(job_id)
    except UserError:
        return False
    return True


def _bring_back(run_dir: Path, job_id: str, host: str, problem: str) -> None:
    """Put another job in this one's place, if that is allowed, and end this one, whose nodes are idle."""
    why = f"node {host}, which the supervisor was on, is lost"
    _note(run_dir, "node lost", host=host, message="no answer; the supervisor was on it")
    problem = problem or _insist(lambda: _replace(run_dir, job_id, why))
    if problem:
        _note(run_dir, "ends", message=f"{why}; {problem}")
        close_status(run_dir, "interrupted" if book.is_cancelled(run_dir) else "failed", f"{why}; {problem}")
    _insist(lambda: commands.run(["scancel", job_id]))


def _replace(run_dir: Path, job_id: str, why: str) -> None:
    # Whoever has ended or requeued the whole job ends this step with it; one that lives on was left behind.
    if (state := job_facts(job_id).state) != "RUNNING":
        raise UserError(f"Slurm has broken the job apart (it is {state or 'unknown'})")
    _note(run_dir, REPLACED, by=replace(run_dir, int(job_id)).job, message=why)


def _insist(act: Callable[[], object]) -> str:
    """Ask Slurm until it answers; returns why it did not do what was asked, or nothing."""
    until = time.monotonic() + _INSIST_S
    while True:
        try:
            act()
        except UserError as error:
            # A second submission might be beside one that nobody has confirmed.
            if isinstance(error, Unconfirmed) or time.monotonic() > until:
                return f"{error}; {GO_ON}"
        else:
            return ""
        time.sleep(_AGAIN_S)


def _note(run_dir: Path, event: str, **more: str | int) -> None:
    with contextlib.suppress(OSError):  # a full disk must not keep the run from going on
        events.write(run_dir, event, **more)


if __name__ == "__main__":
    main(sys.argv[1:])
