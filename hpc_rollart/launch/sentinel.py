"""Passes Slurm's signals on to the supervisor: a step of its own that does nothing else.

`scancel --signal`, `--signal` without `B:` and preemption signal the steps of a job and leave the batch step,
in which the supervisor is, without a word. Run on the supervisor's node as
``python -m hpc_rollart.launch.sentinel PID``.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

from hpc_rollart.launch.agent import step_command, step_environment
from hpc_rollart.launch.processes import end_with_parent

_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def watching(job_id: str, group: int, host: str, python: str) -> Iterator[None]:
    """Have a sentinel on this node for as long as the context is open."""
    line = [*step_command(job_id, group, host, 1, "sentinel"), python]
    line += ["-m", "hpc_rollart.launch.sentinel", str(os.getpid())]
    environment = step_environment(dict(os.environ), job_id)
    with subprocess.Popen(
        line,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # that it was ended is no news
        start_new_session=True,
        preexec_fn=end_with_parent,
    ) as process:
        try:
            yield
        finally:
            if process.poll() is not None:
                print(f"the sentinel ended early, with code {process.returncode}", flush=True)
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()


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
