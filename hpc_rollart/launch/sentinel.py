"""Passes Slurm's signals on to the supervisor: a step of its own that does nothing else.

`scancel --signal`, `--signal` without `B:` and preemption signal the steps of a job and leave the batch step,
in which the supervisor is, without a word. Run on the supervisor's node as
``python -m hpc_rollart.launch.sentinel PID``.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from hpc_rollart.launch.side_step import SideStep

_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def watching(job_id: str, group: int, host: str, python: str) -> Iterator[None]:
    """Have a sentinel on this node for as long as the context is open."""
    command = [python, "-m", "hpc_rollart.launch.sentinel", str(os.getpid())]
    step = SideStep("sentinel", job_id, group, host, command)
    try:
        yield
    finally:
        step.end()


def main(argv: list[str]) -> None:
    """Wait for signals and pass each one on, until the supervisor is gone."""
    supervisor = int(argv[0])

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    while True:
        try:
            os.kill(supervisor, 0)
        except ProcessLookupError:
            return
        signal.sigtimedwait([], 2.0)


if __name__ == "__main__":
    main(sys.argv[1:])
