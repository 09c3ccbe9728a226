"""Ends a run's Slurm job for good: in good order with a checkpoint, or at once."""

import time
from collections.abc import Callable
from pathlib import Path

from hpc_rollart.config.load import load_resolved
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book, commands
from hpc_rollart.jobs.commands import Runner, SlurmError
from hpc_rollart.jobs.queue import Phase, Queue

# What the supervisor needs beside the ranks' own deadline: to hear of the signal and to end their processes.
_MARGIN_S = 60.0
# From scancel to the end Slurm waits for its KillWait, and for each node's epilog.
_GONE_S = 180.0


def cancel(
    run_dir: Path,
    *,
    now: bool = False,
    say: Callable[[str], None] = print,
    runner: Runner = commands.run,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """End the run's job and wait until it is gone.

    Parameters
    ----------
    now
        End a running job at once, without a checkpoint.
    say
        Told what is being done, a line each.

    Returns
    -------
    bool
        Whether there was a job to end.

    Raises
    ------
    UserError
        The run was never submitted, or Slurm refuses or does not answer.
    """
    record = book.latest(run_dir)
    queue = Queue(record.job, runner, clock)
    state = queue.state()
    if not state.there:
        say(f"job {record.job} has ended already")
        return False
    # Before any signal: whoever would requeue the job looks here first.
    try:
        book.mark_cancelled(run_dir, record.job)
    except UserError as error:
        # The job is ended all the same: one that goes back into the queue is met there below.
        say(
            f"{error}; so the job may go back into the queue, and is ended there: let this finish, or use "
            f"scancel {record.job} at once"
        )
    try:
        deadline_s = load_resolved(run_dir).stop_deadline_s + _MARGIN_S
    except UserError as error:  # a damaged config is no reason to keep the nodes
        say(f"{str(error).splitlines()[0]}; so the job is ended without waiting for a checkpoint")
        now = True
    if state.phase is Phase.RUNNING and not now:
        say(f"stopping job {record.job} in good order, with a checkpoint; at most {deadline_s:.0f} s")
        try:
            runner(["scancel", "--batch", "--signal=TERM", str(record.job)])
        except SlurmError as error:
            say(f"the job took no signal ({str(error).splitlines()[0]}), so it is ended at once")
        else:
            if _gone(queue, deadline_s, sleep, clock, give_up_on=Phase.WAITING):
                say(f"job {record.job} has stopped")
                return True
            say("it has not ended by itself, so it is ended now")
    say(f"ending job {record.job} at once")
    runner(["scancel", str(record.job)])
    if _gone(queue, _GONE_S, sleep, clock):
        say(f"job {record.job} is cancelled")
    else:
        say(f"job {record.job} is cancelled, but Slurm still lists it after {_GONE_S:.0f} s: see squeue")
    return True


def _gone(
    queue: Queue,
    deadline_s: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    give_up_on: Phase | None = None,
) -> bool:
    """Wait until the job has left the queue; a phase to give up on says that it will not by itself."""
    end = clock() + deadline_s
    while clock() < end:
        try:
            state = queue.state()
        except SlurmError:
            state = None  # no answer says nothing; the deadline holds
        if state is not None and state.phase is Phase.ENDED:
            return True
        if state is not None and state.phase is give_up_on:
            return False
        sleep(1.0)
    return False
