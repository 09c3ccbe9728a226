"""What a run directory knows of its Slurm jobs: RUN/slurm/ and RUN/cluster.yaml."""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from hpc_rollart.config.cluster import Cluster, load_cluster
from hpc_rollart.errors import UserError
from hpc_rollart.launch import placement
from hpc_rollart.launch.rundir import append_line, write_json, writing

CLUSTER_FILE = "cluster.yaml"
_JOBS_FILE = "jobs.jsonl"
# Longer than any command of Slurm's may take here.
_ABANDONED_S = 600.0


@dataclass(frozen=True)
class JobPart:
    """One het component of a submitted job; its number in the list is its offset."""

    component: str
    partition: str
    nodes: int
    ranks: int
    gpus: int


@dataclass(frozen=True)
class JobRecord:
    """One submission, a line of RUN/slurm/jobs.jsonl.

    Attributes
    ----------
    job
        Id of the het job: its first component's, by which Slurm names the whole.
    submitted
        Unix seconds.
    script, log
        Batch script as submitted, and output of the batch step.
    """

    job: Annotated[int, msgspec.Meta(gt=0, lt=2**32)]
    submitted: float
    script: str
    log: str
    time_s: float
    components: list[JobPart] = field(default_factory=list)


def folder(run_dir: Path) -> Path:
    """Return where a run's scripts, pickles and batch logs are."""
    return run_dir / "slurm"


def record(run_dir: Path, job: JobRecord) -> None:
    """Add a submission."""
    line = json.dumps(asdict(job) | {"at": time.strftime("%FT%T%z", time.localtime(job.submitted))})
    path = folder(run_dir) / _JOBS_FILE
    with writing(path):
        append_line(path, line)


@contextlib.contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Keep others from starting the same run meanwhile; raises `UserError` if somebody does already.

    A file that is made exclusively, since locks do not work on every parallel file system.
    """
    path = folder(run_dir) / "submitting"
    unique = uuid.uuid4().hex
    mine = f"{os.uname().nodename} {os.getpid()} {unique}"
    with writing(path.parent):
        path.parent.mkdir(exist_ok=True)
        if path.is_dir():
            raise UserError(f"{path}: is a directory, and must be a file or nothing; remove it")
        _remove_abandoned(path, aside=path.with_name(f".submitting.{unique}"))
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(mine)
        except FileExistsError:
            raise UserError(
                f"{run_dir}: somebody else submits or resumes this run just now; see hpc-rollart status"
            ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8") == mine:  # else it was taken for abandoned
                path.unlink()
            path.parent.rmdir()  # only if it is empty: a run of one machine has no use for it


def _remove_abandoned(path: Path, aside: Path) -> None:
    """Remove the file of one who was killed; of several who try that, one does."""
    with contextlib.suppress(FileNotFoundError):
        if not _abandoned(path):
            return
        path.rename(aside)
        if not _abandoned(aside):
            # Somebody was quicker, and this is already the file that he has made anew: he gets it back.
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _abandoned(path: Path) -> bool:
    old = time.time() - path.stat().st_mtime > _ABANDONED_S
    try:
        host, pid, _ = path.read_text(encoding="utf-8").split()
        return not psutil.pid_exists(int(pid)) if host == os.uname().nodename else old
    except ValueError:  # it is just being written
        return old


def records(run_dir: Path) -> list[JobRecord]:
    """Return all submissions of a run, oldest first; raises `UserError` if the file is damaged.

    A line that somebody was killed in the middle of counts for nothing. It is no JSON, and either the last
    one and without an end, or the next one to write began a new line after it. So what is no JSON is damage
    only where no record follows a whole line of it.
    """
    path = folder(run_dir) / _JOBS_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    found, torn = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=JobRecord))
            torn = ""
        except (ValueError, RecursionError) as error:
            torn = f"{path}:{number}: not the record of a job ({error}); remove the line"
            if isinstance(error, msgspec.ValidationError):
                raise UserError(torn) from None
    if torn and text.endswith(b"\n"):
        raise UserError(torn)
    return found


def latest(run_dir: Path) -> JobRecord:
    """Return the last submission; raises `UserError` when there is none."""
    found = records(run_dir)
    if not found:
        raise UserError(f"{run_dir}: this run was never submitted to Slurm")
    return found[-1]


# --- the profile -------------------------------------------------------------------------------------


def write_cluster(run_dir: Path, cluster: Cluster) -> None:
    """Keep the resolved profile in the run directory."""
    path = run_dir / CLUSTER_FILE
    aside = path.with_name(f".{CLUSTER_FILE}.{os.getpid()}")
    with writing(path):
        aside.write_text(placement.dump(cluster), encoding="utf-8")
        os.replace(aside, path)


def load_resolved_cluster(run_dir: Path, overrides: list[str] | None = None) -> Cluster:
    """Return the profile that a run was submitted with; raises `ConfigError` as `load_cluster`."""
    return load_cluster(str(run_dir / CLUSTER_FILE), overrides or [])


# --- cancelling --------------------------------------------------------------------------------------


def mark_cancelled(run_dir: Path, job: int) -> None:
    """Note that this job is to end for good: whoever would requeue it reads `is_cancelled` first."""
    path = _cancelled(run_dir)
    with writing(path):
        write_json(path, {"job": job, "t": time.time()})


def is_cancelled(run_dir: Path) -> bool:
    """Return whether the run's present job was cancelled by `hpc-rollart cancel`."""
    return _cancelled(run_dir).exists()


def clear_cancelled(run_dir: Path) -> None:
    """Forget a cancellation, for the next job of the run."""
    path = _cancelled(run_dir)
    with writing(path):
        path.unlink(missing_ok=True)


def _cancelled(run_dir: Path) -> Path:
    return folder(run_dir) / "cancelled"
