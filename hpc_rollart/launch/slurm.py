"""A submitit executor that submits one heterogeneous job.

submitit's own executor knows one set of options. This one keeps its folder, its pickle, its job handle and
its way of requeueing, and writes another batch script: a set of options for each component.
"""

import contextlib
import re
import uuid
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.core.core import Job
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpc_rollart.launch import sitecommands
from hpc_rollart.launch.batch import Batch


class HetSlurmExecutor(SlurmExecutor):
    """Submits callables as heterogeneous Slurm jobs.

    Parameters
    ----------
    folder
        Where scripts, pickles and logs go; on a file system that all nodes see.
    batch
        The script without its command; options have a set for the whole job and one for each component.
    time_s
        Time limit, by which submitit tells a time-out from a preemption.
    max_requeues
        How often a job may put itself back into the queue after a time-out.
    python
        Python on the nodes, as a shell word.
    runner
        Runs sbatch.
    """

    def __init__(
        self,
        folder: Path,
        batch: Batch,
        *,
        time_s: float,
        max_requeues: int,
        python: str,
        runner: sitecommands.Runner = sitecommands.run,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_requeues, python=python)
        self._script = batch
        self._runner = runner
        self.parameters = {"time": max(1, int(time_s // 60))}

    @classmethod
    def affinity(cls) -> int:
        """Always usable: a script can be shown where there is no Slurm, and sbatch says what it lacks."""
        return 2

    def script(self) -> str:
        """Return the batch script that `submit` would hand to sbatch."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script.text(command)

    def _num_tasks(self) -> int:
        return 1  # the batch step's one process, however many ranks it starts

    def _submit_command(self, command: str) -> Job[Any]:
        # submitit's own has no deadline, hands on the environment as it is and prints what sbatch says.
        self.folder.mkdir(parents=True, exist_ok=True)
        uid = uuid.uuid4().hex
        script = self.folder / f".submission_file_{uid}.sh"
        try:
            script.write_text(self._make_submission_file_text(command, uid), encoding="utf-8")
            said = self._runner(self._make_submission_command(script))
            try:
                job_id = self._get_job_id_from_submission_command(said)
            except utils.FailedSubmissionError:
                raise sitecommands.SlurmError(f"sbatch named no job: {said.strip()}; see squeue") from None
        except BaseException:
            for left in (script, *self.folder.glob("*.pkl")):
                # A pickle without a job id in its name was meant for the job that there is not.
                if left == script or re.fullmatch(r"[0-9a-f]{32}\.pkl", left.name):
                    with contextlib.suppress(OSError):
                        left.unlink()
            raise
        job: SlurmJob[Any] = SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])
        job.paths.move_temporary_file(script, "submission_file")
        return job


def log_pattern(folder: Path) -> str:
    """Return the batch step's log in sbatch's words: `%j` stands for the job."""
    return str(utils.JobPaths(folder).stdout).replace("%t", "0")


def log_file(folder: Path, job_id: int | str) -> Path:
    """Return the batch step's log of a job."""
    return Path(utils.JobPaths(folder, str(job_id), 0).stdout)
