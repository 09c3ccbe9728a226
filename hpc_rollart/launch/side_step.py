"""A step of one process that helps the supervisor, on any node of the job, and ends with it."""

import os
import signal
import subprocess
from collections.abc import Sequence

from hpc_rollart.launch.agent import step_command, step_environment
from hpc_rollart.launch.processes import end_with_parent

# What srun makes of SIGTERM and SIGKILL to the step.
_ENDED_BY_SLURM = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


class SideStep:
    """The step, from its start to its end.

    Parameters
    ----------
    name
        What it is called in Slurm and in the log.
    job_id, group, host
        Where it runs.
    command
        Python, and what it runs.
    """

    def __init__(self, name: str, job_id: str, group: int, host: str, command: Sequence[str]) -> None:
        self.host, self._name = host, name
        self._process = subprocess.Popen(
            [*step_command(job_id, group, host, 1, name), *command],
            env=step_environment(dict(os.environ), job_id),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # that it was ended is no news
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    @property
    def over(self) -> bool:
        """Whether it has ended already."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End it, and say so if it ended before, and not with the job."""
        if self.over and self._process.returncode not in _ENDED_BY_SLURM:
            print(f"the {self._name} ended early, with code {self._process.returncode}", flush=True)
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
