"""Submitting a run, and submitting it again, to a Slurm whose answers are written down."""

import errno
import functools
import os
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_rollart.config import ConfigError, load_resolved
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book, commands
from hpc_rollart.jobs.commands import CommandMissing, CommandTimeout, SlurmError
from hpc_rollart.launch import sitecheck, submit
from hpc_rollart.launch.rundir import amend_manifest
from hpc_rollart.launch.slurm import Unconfirmed
from tests.launch.fake_rank import write_status
from tests.launch.site import ENDED, PENDING, RUNNING, FakeSlurm, make_cluster, make_run, refused, sent


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs here, so what would be run does not matter."""
    monkeypatch.setattr(submit, "supervise", lambda run_dir: functools.partial(print, run_dir))


# --- submit ------------------------------------------------------------------------------------------


def test_submitted_run_has_its_profile_its_script_and_a_record_of_its_job(tmp_path: Path) -> None:
    result = sent(tmp_path, account="proj")
    run = result.run_dir
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert book.load_resolved_cluster(run) == make_cluster(account="proj")
    (record,) = book.records(run)
    assert record == result.job == book.latest(run)
    assert (record.job, record.time_s) == (4711, 7200.0)
    assert [part.component for part in record.components] == list(load_resolved(run).components)
    assert [(part.partition, part.nodes, part.ranks, part.gpus) for part in record.components] == [
        ("gpu-h100", 1, 1, 1), ("gpu-h100", 1, 2, 2), ("gpu-h20", 2, 16, 16), ("standard", 2, 8, 0),
    ]  # fmt: skip
    assert "#SBATCH hetjob" in Path(record.script).read_text()
    assert Path(record.log) == run / "slurm" / "4711_0_log.out"
    # submitit's folder: the script, the pickle, and nothing that is left over.
    assert sorted(os.listdir(run / "slurm")) == ["4711_submission.sh", "4711_submitted.pkl", "jobs.jsonl"]


def test_paths_of_the_resolved_run_do_not_depend_on_where_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = make_run(Path("runs"))
    model = config.model.model_copy(update={"builtin": None, "path": "model"})
    config = config.model_copy(update={"model": model})
    result = submit.submit(config, make_cluster(), [], shared=True, runner=FakeSlurm())
    resolved = load_resolved(result.run_dir)
    assert resolved.run.dir == str(tmp_path / "runs" / "demo")
    assert resolved.model.path == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        ("Batch job submission failed: Invalid account or account/partition combination", "--account"),
        ("Batch job submission failed: Invalid partition name specified", "sinfo lists"),
        ("Batch job submission failed: Required partition not available (inactive or drain)", "is down"),
        ("Batch job submission failed: Requested node configuration is not available", "sinfo -o"),
        ("Batch job submission failed: More processors requested than permitted", "fewer nodes"),
        ("Batch job submission failed: Node count specification invalid", "components.NAME.nodes"),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds)", "--time"),
        ("Batch job submission failed: Invalid qos specification", "--qos"),
        ("Invalid generic resource (gres) specification", "gres"),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit)", "QOS allows less"),
    ],
)  # fmt: skip
def test_refusal_is_told_in_slurms_words_with_the_mend_and_leaves_nothing(
    tmp_path: Path, said: str, mend: str
) -> None:
    slurm = FakeSlurm(sbatch=refused("sbatch", f"sbatch: error: {said}"))
    with pytest.raises(SlurmError) as caught:
        sent(tmp_path, slurm)
    assert f"sbatch: {said}" in str(caught.value) and mend in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_directory_that_was_there_before_a_refusal_is_there_after_it(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    with pytest.raises(SlurmError):
        sent(tmp_path, FakeSlurm(sbatch=refused("sbatch", "no")))
    assert os.listdir(tmp_path / "demo") == []


def test_answer_that_names_no_job_is_a_refusal_if_squeue_has_none(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="hello"):
        sent(tmp_path, FakeSlurm(sbatch="hello", squeue="7|/x/other.sh\n"))
    assert os.listdir(tmp_path) == []
    with pytest.raises(Unconfirmed, match="hello"):
        sent(tmp_path, FakeSlurm(sbatch="hello"))
    assert os.listdir(tmp_path) == ["demo"]


def test_without_sbatch_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandMissing, match="no sbatch here: run this on a login node of the cluster"):
        submit.submit(make_run(tmp_path), make_cluster(), [], shared=True)
    assert os.listdir(tmp_path) == []


PARTITION = "PartitionName=gpu-h20 MaxNodes={most} MaxTime={time} State={state} TotalNodes={total}\n"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"state": "DOWN"}, "Slurm's partition standard is DOWN"),
        ({"total": 1}, "2 nodes, but Slurm's partition gpu-h100 has 1; use fewer"),
        ({"most": 1}, "2 nodes, but a job may have 1 in Slurm's partition gpu-h20; use fewer"),
        ({"time": "01:00:00"}, "runs jobs of at most 01:00:00; ask for less with --time"),
    ],
)
def test_job_that_slurm_would_take_and_never_start_is_refused(
    tmp_path: Path, values: dict[str, Any], line: str
) -> None:
    text = PARTITION.format(**{"most": "UNLIMITED", "time": "1-00:00:00", "state": "UP", "total": 9} | values)
    with pytest.raises(ConfigError) as caught:
        sent(tmp_path, FakeSlurm(scontrol=text))
    assert line in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_of_several_partitions_one_that_fits_is_enough(tmp_path: Path) -> None:
    def scontrol(command: Sequence[str]) -> str:
        state = "DOWN" if command[-1] == "gone" else "UP"
        return PARTITION.format(most="UNLIMITED", time="UNLIMITED", state=state, total=9)

    parts = make_cluster().model_dump()["partitions"]
    parts["cpu"]["partition"] = "gone,standard"
    assert sent(tmp_path, FakeSlurm(scontrol=scontrol), partitions=parts).job.job == 4711


def test_partition_that_slurm_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"partitions\.big: Slurm has no partition gpu-h100; sinfo lists"):
        sent(tmp_path, FakeSlurm(scontrol=refused("scontrol", "Partition gpu-h100 not found")))


def test_dry_run_makes_nothing_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit.script(make_run(tmp_path), make_cluster(), shared=True).startswith("#!/bin/bash\n")
    assert os.listdir(tmp_path) == []


# --- jobs that nobody confirms -----------------------------------------------------------------------

SILENT = [
    CommandTimeout("sbatch has not answered within 45 s"),
    refused("sbatch", "Batch job submission failed: Socket timed out on send/recv operation"),
    KeyboardInterrupt(),
]
WORDS = ["has not answered", "Socket timed out", "interrupted while sbatch ran"]


class SilentSlurm(FakeSlurm):
    """Leaves open whether it took the job; `lists` is whether squeue has it."""

    def __init__(self, error: BaseException, *, lists: bool | SlurmError) -> None:
        super().__init__(sbatch=self.sbatch, squeue=self.squeue)
        self.error, self.lists, self.script = error, lists, ""

    def sbatch(self, command: Sequence[str]) -> str:
        self.script = command[-1]
        raise self.error

    def squeue(self, command: Sequence[str]) -> str:
        if "--me" not in command:
            return PENDING if self.lists else ENDED
        if isinstance(self.lists, SlurmError):
            raise self.lists
        job = "".join(f"4711+{n}|/other/way/to{self.script}\n" for n in range(4))
        return "7|/x/other.sh\n8|(null)\n" + (job if self.lists else "")


@pytest.mark.parametrize("error", SILENT, ids=WORDS)
def test_job_that_sbatch_did_not_confirm_is_recorded_if_squeue_lists_it(
    tmp_path: Path, error: BaseException
) -> None:
    run = sent(tmp_path, SilentSlurm(error, lists=True)).run_dir
    assert [record.job for record in book.records(run)] == [4711]
    assert sorted(os.listdir(run / "slurm")) == ["4711_submission.sh", "4711_submitted.pkl", "jobs.jsonl"]
    again = submit.resubmit(run, make_cluster(), runner=SilentAfterEnd(error))
    assert again.job.job == 4711 and len(book.records(run)) == 2


class SilentAfterEnd(SilentSlurm):
    """The job before has ended, and the next one is not confirmed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error, lists=True)

    def squeue(self, command: Sequence[str]) -> str:
        return super().squeue(command) if "--me" in command else ENDED


@pytest.mark.parametrize(("error", "words"), list(zip(SILENT, WORDS, strict=True)), ids=WORDS)
@pytest.mark.parametrize("lists", [False, refused("squeue", "Unable to contact slurm controller")])
def test_job_of_which_nobody_knows_keeps_its_directory_and_is_taken_up_later(
    tmp_path: Path, error: BaseException, words: str, lists: bool | SlurmError
) -> None:
    slurm = SilentSlurm(error, lists=lists)
    with pytest.raises(Unconfirmed) as caught:
        sent(tmp_path, slurm)
    run = tmp_path / "demo"
    for text in (words, "may be in the queue all the same", "squeue --me", f"hpc-rollart resubmit {run}"):
        assert text in str(caught.value)
    assert book.records(run) == []
    slurm.lists = True
    with pytest.raises(UserError, match="job 4711 of this run is still waiting"):
        submit.resubmit(run, make_cluster(), runner=slurm)
    assert slurm.names().count("sbatch") == 1
    record = book.latest(run)
    assert record.job == 4711 and "#SBATCH hetjob" in Path(record.script).read_text()
    assert sorted(os.listdir(run / "slurm")) == ["4711_submission.sh", "4711_submitted.pkl", "jobs.jsonl"]


def test_job_that_never_came_is_forgotten_when_the_run_is_submitted_again(tmp_path: Path) -> None:
    with pytest.raises(Unconfirmed):
        sent(tmp_path, SilentSlurm(SILENT[0], lists=False))
    slurm = FakeSlurm(squeue="7|/x/other.sh\n")
    run = submit.resubmit(tmp_path / "demo", make_cluster(), runner=slurm).run_dir
    assert [record.job for record in book.records(run)] == [4711]
    assert sorted(os.listdir(run / "slurm")) == ["4711_submission.sh", "4711_submitted.pkl", "jobs.jsonl"]


def test_job_that_cannot_be_recorded_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    slurm = FakeSlurm()
    with pytest.raises(UserError, match=r"slurm/jobs\.jsonl: cannot be written: No space left on device"):
        sent(tmp_path, slurm)
    assert slurm.asked[-1] == ["scancel", "4711"]
    assert os.listdir(tmp_path) == []
    with pytest.raises(Unconfirmed, match=r"(?s)job 4711 is in the queue.*end it with scancel 4711"):
        sent(tmp_path, FakeSlurm(scancel=refused("scancel", "no")))
    assert os.listdir(tmp_path) == ["demo"]


def test_ctrl_c_before_sbatch_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(book, "write_cluster", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sent(tmp_path)
    assert os.listdir(tmp_path) == []


# --- paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tmp/runs/a", "/dev/shm/a", "/scratch/local/a", "/var/tmp/a"])
def test_run_directory_that_only_one_node_sees_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch/local")
    (line,) = sitecheck.paths(make_run(Path("/")), make_cluster(), Path(path), shared=False)
    assert line.startswith(f"run.dir: {path} is below /") and "--dir" in line and "--shared" in line
    assert sitecheck.paths(make_run(Path("/")), make_cluster(), Path(path), shared=True) == []
    assert sitecheck.paths(make_run(Path("/")), make_cluster(), Path("/project/a"), shared=False) == []


def test_python_and_model_that_only_one_node_sees_are_refused() -> None:
    config = make_run(Path("/"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "/tmp/m"})})
    lines = sitecheck.paths(
        config, make_cluster(python="/tmp/venv/bin/python"), Path("/project/a"), shared=False
    )
    assert [line.split(":")[0] for line in lines] == ["python", "model.path"]


@pytest.mark.parametrize("scratch", ["$NODE", "$NODE/x", "/nvme/x"])
def test_scratch_of_the_profile_is_local_too(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE", "/nvme")
    (line,) = sitecheck.paths(
        make_run(Path("/")), make_cluster(scratch=scratch), Path("/nvme/x/a"), shared=False
    )
    assert "which is local to each node" in line
    monkeypatch.delenv("NODE")
    unset = make_cluster(scratch="$NODE/x")
    assert sitecheck.paths(make_run(Path("/")), unset, Path("/x/a"), shared=False) == []


@pytest.mark.parametrize("name", ["100%", "it's", 'a"b', "a\\b", "a\nb"])
def test_run_directory_that_sbatch_cannot_write_its_log_to_is_refused(name: str) -> None:
    (line,) = sitecheck.paths(make_run(Path("/")), make_cluster(), Path("/work") / name, shared=True)
    assert "which sbatch cannot write a log to" in line


def test_built_in_model_that_no_node_can_fetch_must_be_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLART_CACHE", str(tmp_path))
    config = make_run(Path("/"))
    model = config.model.model_copy(update={"builtin": "smollm2-135m-instruct"})
    config = config.model_copy(update={"model": model})
    (line,) = sitecheck.paths(config, make_cluster(), Path("/project/a"), shared=False)
    assert "first run hpc-rollart model build" in line
    made = tmp_path / "models" / "smollm2-135m-instruct-0123" / "config.json"
    made.parent.mkdir(parents=True)
    made.write_text("{}")
    assert sitecheck.paths(config, make_cluster(), Path("/project/a"), shared=False) == []


# --- Slurm's commands --------------------------------------------------------------------------------


def test_slurms_commands_run_in_a_clean_environment_with_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "squeue"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in slow) exec sleep 60;; no) echo "error: no" >&2; exit 3;; *) env;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SQUEUE_FORMAT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", str(tool))  # any file that is there
    shown = commands.run(["squeue"]).splitlines()
    assert f"SLURM_CONF={tool}" in shown
    assert not [line for line in shown if line.startswith(("SLURM_JOB_ID", "SQUEUE_FORMAT"))]
    with pytest.raises(SlurmError, match="squeue: no"):
        commands.run(["squeue", "no"])
    with pytest.raises(CommandTimeout, match=r"squeue has not answered within 0\.2 s"):
        commands.run(["squeue", "slow"], deadline_s=0.2)


# --- resubmit ----------------------------------------------------------------------------------------


def test_resubmitting_adds_a_job_to_the_same_run_and_forgets_the_cancellation(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    amend_manifest(run, directory="/where/it/began")
    book.mark_cancelled(run, 4711)
    cluster = book.load_resolved_cluster(run, ["time=4h"])
    result = submit.resubmit(run, cluster, runner=FakeSlurm(sbatch="Submitted batch job 4800\n"))
    assert [record.job for record in book.records(run)] == [4711, 4800]
    assert not book.is_cancelled(run)
    text = Path(result.job.script).read_text()
    assert "--time=04:00:00" in text and "--chdir=/where/it/began" in text
    assert book.load_resolved_cluster(run).time == 14400.0


@pytest.mark.parametrize("lines", [RUNNING, PENDING, RUNNING.replace("RUNNING", "NEWSTATE")])
def test_run_whose_job_is_still_there_is_not_submitted_again(tmp_path: Path, lines: str) -> None:
    run = sent(tmp_path).run_dir
    slurm = FakeSlurm(squeue=lines)
    with pytest.raises(UserError, match="job 4711 of this run is still"):
        submit.resubmit(run, make_cluster(), runner=slurm)
    assert "sbatch" not in slurm.names()


def test_a_job_in_place_of_one_that_lives_waits_for_its_end(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    record = submit.replace(run, 4711, runner=FakeSlurm(sbatch="Submitted batch job 4800\n"))
    assert record.job == 4800 == book.latest(run).job
    text = Path(record.script).read_text()
    assert text.count("#SBATCH --dependency=afterany:4711\n") == 1
    assert text.index("--dependency") < text.index("hetjob"), "of the whole job"


def test_two_do_not_submit_the_same_run_at_once(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    with book.alone(run), pytest.raises(UserError, match="somebody else submits or resumes"):
        submit.resubmit(run, make_cluster(), runner=FakeSlurm())
    # One that was killed long ago keeps nobody out.
    left = run / "slurm" / "submitting"
    left.touch()
    os.utime(left, (0, 0))
    submit.resubmit(run, make_cluster(), runner=FakeSlurm())
    assert not left.exists()
    assert not list(left.parent.glob(".submitting*"))


def test_submission_that_was_killed_on_this_machine_keeps_nobody_out(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    dead = subprocess.Popen(["true"])
    dead.wait(timeout=10)
    left = run / "slurm" / "submitting"
    left.write_text(f"{os.uname().nodename}x {dead.pid} 0")  # of another machine nothing is known
    with pytest.raises(UserError, match="somebody else"):
        submit.resubmit(run, make_cluster(), runner=FakeSlurm())
    left.write_text(f"{os.uname().nodename} {dead.pid} 0")
    submit.resubmit(run, make_cluster(), runner=FakeSlurm())


def test_of_two_that_find_an_abandoned_submission_the_later_one_leaves_the_other_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sent(tmp_path).run_dir
    left = run / "slurm" / "submitting"
    left.touch()
    os.utime(left, (0, 0))
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        # Between this one's look and its rename another has removed the old file and made its own.
        left.write_text("another's")
        os.utime(left)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(UserError, match="somebody else"), book.alone(run):
        pass
    assert left.read_text() == "another's"
    assert not list(left.parent.glob(".submitting*"))


def test_directory_in_the_place_of_the_file_that_keeps_others_out_is_one_error(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    place = run / "slurm" / "submitting"
    place.mkdir()
    os.utime(place, (0, 0))
    with pytest.raises(UserError, match=r"slurm/submitting: is a directory, .*; remove it"):
        submit.resubmit(run, make_cluster(), runner=FakeSlurm())
    assert place.is_dir()


@pytest.mark.parametrize("name", ["slurm/cancelled", "cluster.yaml"])
def test_what_cannot_be_written_when_submitting_again_is_named(tmp_path: Path, name: str) -> None:
    run = sent(tmp_path).run_dir
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    slurm = FakeSlurm()
    with pytest.raises(UserError, match=rf"{name}: cannot be written: \w"):
        submit.resubmit(run, make_cluster(), runner=slurm)
    assert "sbatch" not in slurm.names() and not (run / "slurm" / "submitting").exists()


def test_disk_that_is_full_when_submitting_again_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sent(tmp_path).run_dir

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="cannot be written: Read-only file system"):
        submit.resubmit(run, make_cluster(), runner=FakeSlurm())


def test_run_with_a_damaged_manifest_is_not_submitted_again(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    (run / "manifest.json").write_text("[]")
    slurm = FakeSlurm()
    with pytest.raises(UserError, match=r"manifest\.json: not a run's manifest"):
        submit.resubmit(run, make_cluster(), runner=slurm)
    assert "sbatch" not in slurm.names()


def test_run_that_is_alive_elsewhere_is_not_submitted_again(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    write_status(run, state="running")
    slurm = FakeSlurm()
    with pytest.raises(UserError, match="the run reported 0 s ago, so it goes on already"):
        submit.resubmit(run, make_cluster(), runner=slurm)
    assert "sbatch" not in slurm.names()
    write_status(run, state="running", t=time.time() - 60.0)
    submit.resubmit(run, make_cluster(), runner=slurm)


def test_run_that_is_done_is_not_submitted_again(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    write_status(run, state="done")
    with pytest.raises(UserError, match="the run is done"):
        submit.resubmit(run, make_cluster(), runner=FakeSlurm())
