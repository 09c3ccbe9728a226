"""A submitit executor that submits one heterogeneous job.

submitit's own executor knows one set of options. This one keeps its folder, its pickle, its job handle and
its way of requeueing, and writes another batch script: a set of options for each component.
"""

import contextlib
import re
import shlex
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.core.core import Job
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpc_rollart.config.cluster import Cluster, python_of
from hpc_rollart.jobs import commands
from hpc_rollart.jobs.commands import CommandTimeout, SlurmError
from hpc_rollart.jobs.queue import own_jobs
from hpc_rollart.launch.batch import ODD, Batch, Option
from hpc_rollart.launch.placement import Placement

# sbatch's own words for a request that was sent and not answered.
_UNANSWERED = ("socket timed out", "zero bytes were transmitted")
_SCRIPT, _PICKLE = ".submission_file_", re.compile(r"[0-9a-f]{32}\.pkl")


class Unconfirmed(SlurmError):
    """A job was submitted and nobody knows whether it is in the queue; its files are kept."""


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
        Runs sbatch, and squeue where sbatch leaves open whether there is a job.

    Attributes
    ----------
    job_id
        The job, as soon as its id is known: whatever fails afterwards, it is in the queue.
    interrupted
        Whether Ctrl-C came while sbatch ran, and too late.
    """

    def __init__(
        self,
        folder: Path,
        batch: Batch,
        *,
        time_s: float,
        max_requeues: int,
        python: str,
        runner: commands.Runner = commands.run,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_requeues, python=python)
        self._script = batch
        self._runner = runner
        self.job_id: int | None = None
        self.interrupted = False
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
        script = self.folder / f"{_SCRIPT}{uid}.sh"
        try:
            script.write_text(self._make_submission_file_text(command, uid), encoding="utf-8")
            self.job_id = self._sbatch(script)
        except Unconfirmed:
            raise
        except BaseException:
            forget(script)
            raise
        job: SlurmJob[Any] = SlurmJob(folder=self.folder, job_id=str(self.job_id), tasks=[0])
        job.paths.move_temporary_file(script, "submission_file")
        return job

    def _sbatch(self, script: Path) -> int:
        """Run sbatch and return the job's id; where sbatch does not say, squeue is asked once."""
        # Whether a job that squeue does not list yet may come all the same.
        late = True
        broken_off: KeyboardInterrupt | None = None
        try:
            said = self._runner(self._make_submission_command(script))
            try:
                return int(self._get_job_id_from_submission_command(said))
            except utils.FailedSubmissionError:
                why, late = f"sbatch named no job: {said.strip()}", False
        except CommandTimeout as error:
            why = str(error)
        except SlurmError as error:
            if not any(words in error.said.lower() for words in _UNANSWERED):
                raise
            why = str(error)
        except KeyboardInterrupt as error:
            why, self.interrupted, broken_off = "interrupted while sbatch ran", True, error
        try:
            found = find(script, self._runner)
        except (SlurmError, KeyboardInterrupt):
            found, late = None, True
        if found is not None:
            return found
        if late:
            # By its cause the command's exit code is that of Ctrl-C.
            raise Unconfirmed(
                f"{why}\nthe job may be in the queue all the same: see squeue --me"
            ) from broken_off
        raise SlurmError(why)


def make_executor(
    folder: Path,
    cluster: Cluster,
    placed: Sequence[Placement],
    *,
    name: str,
    title: Sequence[str],
    directory: str,
    max_requeues: int,
    after: int | None = None,
    runner: commands.Runner,
) -> HetSlurmExecutor:
    """Return what submits one job with a place for each component.

    Parameters
    ----------
    folder
        For scripts, pickles and logs.
    name, title
        The job's name, and the comment at the top of its script.
    directory
        Where the batch step starts; left to Slurm where sbatch could not take it as it stands.
    after
        A job that must have ended before this one starts.
    """
    options: dict[str, Option] = {
        "job-name": ODD.sub("-", name)[:64],
        "output": log_pattern(folder),
        "open-mode": "append",
    }
    if not ODD.search(directory):
        options["chdir"] = directory
    if after is not None:
        options["dependency"] = f"afterany:{after}"
    # submitit listens for the signal it finds here, in the job.
    environment = {"SUBMITIT_PREEMPT_SIGNAL": cluster.signal.name, **cluster.environment}
    return HetSlurmExecutor(
        folder,
        Batch(title, options, [part.het for part in placed], cluster.modules, cluster.setup, environment),
        time_s=cluster.time,
        max_requeues=max_requeues,
        python=shlex.quote(python_of(cluster)),
        runner=runner,
    )


# --- submissions that nobody confirmed ---------------------------------------------------------------


def unconfirmed(folder: Path) -> list[Path]:
    """Return the scripts in `folder` of which nobody knows whether they became jobs, oldest first."""
    return sorted(folder.glob(f"{_SCRIPT}*.sh"), key=lambda path: path.stat().st_mtime)


def find(script: Path, runner: commands.Runner) -> int | None:
    """Return the job that a script became, or None; every submission's has a name of its own."""
    # By the name alone: the same directory may have several paths.
    return next((job for job, command in own_jobs(runner) if Path(command).name == script.name), None)


def take_up(script: Path, job: int) -> None:
    """Give a script and its pickle their job's name, under which the job looks for them."""
    paths = utils.JobPaths(script.parent, str(job))
    # All pickles of a run say the same. The job waits a minute for it, should it be running already.
    for pickle in [path for path in script.parent.glob("*.pkl") if _PICKLE.fullmatch(path.name)][:1]:
        pickle.rename(paths.submitted_pickle)
    script.rename(paths.submission_file)


def forget(script: Path) -> None:
    """Remove what was written for a job that there is not."""
    with contextlib.suppress(OSError):
        script.unlink(missing_ok=True)
        if not unconfirmed(script.parent):
            for path in script.parent.glob("*.pkl"):
                # One without a job's id in its name waits for its job.
                if _PICKLE.fullmatch(path.name):
                    path.unlink(missing_ok=True)


def script_file(folder: Path, job_id: int | str) -> Path:
    """Return the batch script of a job."""
    return Path(utils.JobPaths(folder, str(job_id)).submission_file)


def log_pattern(folder: Path) -> str:
    """Return the batch step's log in sbatch's words: `%j` stands for the job."""
    return str(utils.JobPaths(folder).stdout).replace("%t", "0")


def log_file(folder: Path, job_id: int | str) -> Path:
    """Return the batch step's log of a job."""
    return Path(utils.JobPaths(folder, str(job_id), 0).stdout)
