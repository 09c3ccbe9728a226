"""Cancelling a job, following its logs and looking at how it stands, against a Slurm that is written down."""

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hpc_rollart.config import load_resolved
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book, cancel, follow
from hpc_rollart.jobs.follow import Choice
from hpc_rollart.jobs.queue import Queue
from hpc_rollart.jobs.status import Status, Watcher, render
from hpc_rollart.launch import submit
from tests.launch.fake_rank import write_status
from tests.launch.site import ENDED, PENDING, RUNNING, Answer, FakeClock, FakeSlurm, refused, sent


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs here, so what would be run does not matter."""
    monkeypatch.setattr(submit, "supervise", lambda run_dir: functools.partial(print, run_dir))


# --- cancel ------------------------------------------------------------------------------------------


class Job:
    """A job that squeue shows in one state until something happens."""

    def __init__(self, lines: str, *, heeds: bool = True, after: str = ENDED) -> None:
        self.lines, self.heeds, self.after = lines, heeds, after

    def squeue(self, _: Sequence[str]) -> str:
        return self.lines

    def scancel(self, command: Sequence[str]) -> str:
        if self.heeds or "--signal=TERM" not in command:
            self.lines = self.after
            self.after = ENDED
        return ""


def cancelled(run: Path, job: Job, *, now: bool = False) -> tuple[bool, list[str], list[list[str]]]:
    said: list[str] = []
    clock, slurm = FakeClock(), FakeSlurm(squeue=job.squeue, scancel=job.scancel)
    was = cancel.cancel(run, now=now, say=said.append, runner=slurm, sleep=clock.sleep, clock=clock)
    return was, said, [command for command in slurm.asked if command[0] == "scancel"]


SIGNAL, KILL = ["scancel", "--batch", "--signal=TERM", "4711"], ["scancel", "4711"]


def test_running_job_is_asked_to_stop_and_marked_so_that_nobody_requeues_it(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    was, said, calls = cancelled(run, Job(RUNNING))
    assert was and calls == [SIGNAL] and said[-1] == "job 4711 has stopped"
    assert book.is_cancelled(run)


def test_job_that_does_not_stop_is_ended_after_the_deadline(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    was, said, calls = cancelled(run, Job(RUNNING, heeds=False))
    assert was and calls == [SIGNAL, KILL] and said[-1] == "job 4711 is cancelled"


def test_job_that_waits_is_ended_at_once_and_so_is_one_that_requeued_itself(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    assert cancelled(run, Job(PENDING))[2] == [KILL]
    assert cancelled(run, Job(RUNNING, after=PENDING))[2] == [SIGNAL, KILL]


def test_cancel_now_asks_nobody(tmp_path: Path) -> None:
    assert cancelled(sent(tmp_path).run_dir, Job(RUNNING), now=True)[2] == [KILL]


def test_cancelling_a_job_that_has_ended_says_so(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    was, said, calls = cancelled(run, Job(ENDED))
    assert not was and calls == [] and said == ["job 4711 has ended already"]
    assert not book.is_cancelled(run)


def test_job_is_cancelled_though_that_cannot_be_noted(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    (run / "slurm" / "cancelled").mkdir()
    was, said, calls = cancelled(run, Job(RUNNING, after=PENDING))  # nothing keeps it from requeueing
    assert was and calls == [SIGNAL, KILL] and said[-1] == "job 4711 is cancelled"
    assert "slurm/cancelled: cannot be written: Is a directory; so the job may go back" in said[0]
    assert "scancel 4711" in said[0]


def test_run_that_was_never_submitted_cannot_be_cancelled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was never submitted"):
        cancel.cancel(tmp_path)


# --- logs --------------------------------------------------------------------------------------------


def write_log(run: Path, attempt: int, name: str, text: str) -> Path:
    path = run / "logs" / str(attempt) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shown(run: Path, choice: Choice, lines: int = 0) -> str:
    out: list[bytes] = []
    follow.show(run, choice, lines, out.append)
    return b"".join(out).decode()


def test_logs_of_the_batch_step_of_a_rank_and_of_a_component(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    with pytest.raises(
        UserError, match="job 4711 has written none: it has not started, or its nodes do not see"
    ):
        shown(run, Choice())
    Path(book.latest(run).log).write_text("one\ntwo\nthree\n")
    assert shown(run, Choice(), 2) == "two\nthree\n"
    assert shown(run, Choice()) == "one\ntwo\nthree\n"
    write_log(run, 0, "env-19.log", "old\n")
    write_log(run, 1, "env-19.log", "new\n")
    write_log(run, 1, "env-20.log", "twenty\n")
    write_log(run, 1, "generate-compute-2.log", "two\n")
    assert shown(run, Choice(rank=19)) == "new\n"
    assert shown(run, Choice(rank=19, attempt=0)) == "old\n"
    assert shown(run, Choice(rank=2)) == "two\n"
    with pytest.raises(UserError, match=r"attempt 1 has env-19\.log, env-20\.log, generate-compute-2\.log"):
        shown(run, Choice(rank=5))
    text = shown(run, Choice(component="env"))
    assert text.index("env-19.log <==\nnew") < text.index("env-20.log <==\ntwenty")


@pytest.mark.parametrize(
    ("choice", "match"),
    [
        (Choice(rank=27), "ranks 0 to 26"),
        (Choice(component="envs"), "it has trainer, generate-compute"),
        (Choice(attempt=3), "none yet"),
        (Choice(rank=1, component="env"), "one of them"),
    ],
)
def test_log_that_the_run_cannot_have_is_refused(tmp_path: Path, choice: Choice, match: str) -> None:
    with pytest.raises(UserError, match=match):
        choice.check(sent(tmp_path).run_dir)


@pytest.mark.parametrize("lines", [1, 2, 3, 50])
@pytest.mark.parametrize(
    "text", ["", "a", "a\n", "a\nb\nc", "a\nb\nc\n", "a\n\n\nb\n", "é" * 70_000 + "\nx\n"]
)
def test_last_lines_are_those_of_the_text(tmp_path: Path, text: str, lines: int) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    out: list[bytes] = []
    tail = follow.Tail(out.append, heads=False)
    tail.begin(path, lines)
    tail.more([path])
    assert b"".join(out).decode() == "".join(text.splitlines(keepends=True)[-lines:])


def test_following_goes_on_over_attempts_and_requeues_and_ends_with_the_job(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    slurm = FakeSlurm(squeue=PENDING)
    first = write_log(run, 0, "trainer-0.log", "".join(f"{n}\n" for n in range(9)))
    events: list[Callable[[], object]] = [
        lambda: first.write_text(first.read_text() + "more\n"),
        lambda: slurm.answers.update(squeue=RUNNING),
        lambda: write_log(run, 1, "trainer-0.log", "again\n"),
        lambda: slurm.answers.update(squeue=ENDED),
    ]
    out: list[bytes] = []

    def sleep(seconds: float) -> None:
        assert seconds == follow.POLL_S
        if events:
            events.pop(0)()
        clock.sleep(seconds)

    clock = FakeClock()
    follow.follow(run, Choice(rank=0), 2, out.append, runner=slurm, sleep=sleep, clock=clock)
    text = b"".join(out).decode()
    assert text == f"==> {first} <==\n7\n8\nmore\n\n==> {run}/logs/1/trainer-0.log <==\nagain\n"
    assert slurm.names() == ["squeue", "squeue"]


def test_following_shows_the_last_lines_of_a_job_when_the_next_one_is_there_already(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    log = Path(book.latest(run).log)
    log.write_text("one\n")

    def replaced() -> None:
        log.write_text("one\nreplaced\n")
        book.record(run, replace(book.latest(run), job=4800, log=str(run / "slurm" / "4800_0_log.out")))
        (run / "slurm" / "4800_0_log.out").write_text("two\n")

    slurm = FakeSlurm(squeue=RUNNING)
    steps: list[Callable[[], object]] = [replaced, lambda: slurm.answers.update(squeue=ENDED)]
    clock = FakeClock()

    def sleep(_: float) -> None:
        clock.sleep(6.0)
        if steps:
            steps.pop(0)()

    out: list[bytes] = []
    follow.follow(run, Choice(), 0, out.append, runner=slurm, sleep=sleep, clock=clock)
    text = b"".join(out).decode()
    assert text.index("one") < text.index("replaced") < text.index("two")


def test_following_a_run_of_this_machine_ends_with_the_run(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    (run / "slurm" / "jobs.jsonl").unlink()
    write_log(run, 0, "mpirun.log", "hello\n")
    write_status(run, state="done")
    out: list[bytes] = []
    follow.follow(run, Choice(), 0, out.append)
    assert b"hello\n" in b"".join(out)


def test_following_a_run_of_this_machine_ends_when_its_launcher_was_killed(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    (run / "slurm" / "jobs.jsonl").unlink()
    write_log(run, 0, "mpirun.log", "hello\n")
    limit_s = load_resolved(run).launch.stall_deadline_s
    write_status(run, t=time.time() - limit_s + 60.0)
    out: list[bytes] = []

    def sleep(_: float) -> None:
        write_log(run, 0, "mpirun.log", "hello\nand out\n")
        write_status(run, t=time.time() - limit_s - 60.0)

    with pytest.raises(UserError, match=rf"{run}: the run has not reported for {limit_s:g} s"):
        follow.follow(run, Choice(), 0, out.append, sleep=sleep)
    assert b"".join(out).endswith(b"hello\nand out\n")


# --- status ------------------------------------------------------------------------------------------


def status_of(run: Path, **answers: Answer) -> Status:
    slurm = FakeSlurm(**answers)
    return Watcher(run, lambda job: Queue(job, slurm)).look()


def page(status: Status) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(status))
    return capture.get()


def test_status_of_a_waiting_job_says_why_in_plain_words(tmp_path: Path) -> None:
    status = status_of(sent(tmp_path).run_dir, squeue=PENDING)
    assert (status.verdict, status.exit_code, status.job) == ("waiting", 0, 4711)
    text = page(status)
    assert "the job: waits for nodes to become free (Resources)" in text
    assert "generate-bandwidth" in text and "job 4711" in text


def test_status_of_a_running_job_has_steps_rewards_time_left_and_requeues(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    write_status(
        run, state="running", step=5, steps=100, staleness={"mean": 0.5, "max": 1}, tokens_per_s=1234.0
    )
    (run / "metrics.jsonl").write_text('{"step": 0, "reward": {"count": 0.25}}\n')
    write_log(run, 2, "env-19.log", "")
    again = "JobId=4711 JobState=RUNNING Restarts=1 Partition=p NumNodes=1\n"
    status = status_of(run, squeue=RUNNING, scontrol=again)
    assert (status.verdict, status.exit_code, status.attempt, status.requeues) == ("running", 0, 2, 1)
    text = page(status)
    for part in (
        "5 of 100",
        "1:00:00 of this job",
        "mean 0.50, max 1",
        "1,234",
        "2, after 1 requeue",
        "0.250",
    ):
        assert part in text
    assert json.loads(json.dumps(status.as_json()))["components"][3]["state"] == "RUNNING"


@pytest.mark.parametrize(
    ("said", "squeue", "verdict", "code"),
    [
        ("", RUNNING, "starting", 0),
        ("interrupted", RUNNING, "starting", 0),  # of the job before this one
        ("failed", RUNNING, "starting", 0),  # an attempt, and the next may follow
        ("running", PENDING, "waiting", 0),
        ("stopping", RUNNING, "stopping", 0),
        ("running", RUNNING.replace("RUNNING", "COMPLETING"), "stopping", 0),
        ("done", ENDED, "done", 0),
        ("done", RUNNING, "done", 0),
        ("failed", ENDED, "failed", 3),
        ("interrupted", ENDED, "stopped", 130),
        ("running", ENDED, "failed", 3),
        ("", ENDED, "failed", 3),
        ("running", "", "failed", 3),  # Slurm has forgotten the job
    ],
)
def test_verdict_from_what_the_run_and_slurm_say(
    tmp_path: Path, said: str, squeue: str, verdict: str, code: int
) -> None:
    run = sent(tmp_path).run_dir
    if said:
        write_status(run, state=said, step=1, steps=100)
    status = status_of(run, squeue=squeue)
    assert (status.verdict, status.exit_code) == (verdict, code)
    assert page(status)


def test_supervisor_that_stops_says_more_than_ranks_that_have_ended(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    write_status(run, state="interrupted", step=1, steps=100)
    events = run / "slurm" / "events.jsonl"
    events.write_text('{"t": 1.0, "job": "4711", "event": "stopping", "message": "received SIGUSR2"}\n')
    status = status_of(run, squeue=RUNNING)
    assert (status.verdict, status.text) == ("stopping", "received SIGUSR2")
    events.write_text(events.read_text() + '{"t": 2.0, "job": "4711", "event": "job starts"}\n')
    assert status_of(run, squeue=RUNNING).verdict == "starting"
    whole = events.read_text()
    for damaged in (
        '{"t": 3.0, "ev',
        "[1]\n",
        '{"t": 3.0, "job": "4711"}\n',
        '{"t": 3.0, "job": "4711", "event": "ends", "message": []}\n',
        '{"t": 1e300, "job": "4711", "event": "ends"}\n',
        '{"t": "3", "job": "4711", "event": "ends"}\n',
    ):
        events.write_text(whole + damaged)
        status = status_of(run, squeue=RUNNING)
        assert status.event == {"t": 2.0, "event": "job starts", "message": ""} and page(status)


def test_what_the_job_before_did_says_nothing_of_the_present_one(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    write_status(run, state="interrupted", step=1, steps=100)
    events = run / "slurm" / "events.jsonl"
    events.write_text('{"t": 1.0, "job": "4700", "event": "ends", "message": "requeue: false"}\n')
    status = status_of(run, squeue=RUNNING)
    assert (status.verdict, status.text, status.event) == ("starting", "", None)


def test_a_job_in_anothers_place_says_why_it_is_there(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    write_status(run, state="starting", step=1, steps=100)
    events = run / "slurm" / "events.jsonl"
    line = {"t": 1.0, "job": "4700", "event": "replaced", "by": 4711, "message": "node h20-1 is lost"}
    events.write_text(json.dumps(line) + "\n")
    status = status_of(run, squeue=PENDING)
    assert status.verdict == "waiting"
    assert status.text == "in place of a job that could not go on: node h20-1 is lost"
    events.write_text(json.dumps(line | {"job": "4711", "event": "requeued", "message": "USR2"}) + "\n")
    assert status_of(run, squeue=PENDING).text == "for its next part"
    events.write_text(json.dumps(line | {"by": 4710}) + "\n")
    assert status_of(run, squeue=PENDING).event is None


def test_job_that_was_cancelled_before_it_said_anything_is_stopped_and_not_failed(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    book.mark_cancelled(run, 4711)
    assert status_of(run, squeue=ENDED).verdict == "stopped"


def test_job_that_ended_before_the_run_was_done_says_how_its_log_ends(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    log = Path(book.latest(run).log)
    log.write_text("slurmstepd: /x/python: No such file or directory\n\n")
    failed = RUNNING.replace("RUNNING", "FAILED")
    text = status_of(run, squeue=failed).text
    assert text == (
        "the job ended (FAILED) before the run was done; hpc-rollart resubmit goes on; "
        'its log ends: "slurmstepd: /x/python: No such file or directory"'
    )
    log.write_text("x" * 1000)
    assert status_of(run, squeue=failed).text.endswith(f': "{"x" * 200}"')


def test_slurm_that_does_not_answer_is_said_and_is_no_verdict_on_the_job(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    status = status_of(run, squeue=refused("squeue", "Unable to contact slurm controller"))
    assert (status.verdict, status.exit_code) == ("unknown", 3)
    write_status(run, state="running")
    status = status_of(run, squeue=refused("squeue", "Unable to contact slurm controller"))
    assert (status.verdict, status.exit_code) == ("running", 0)
    assert "Unable to contact" in status.text


@pytest.mark.parametrize(
    "change", [{"job": "4711"}, {"components": "trainer"}, {"log": None}, {"components": [{"nodes": 1}]}]
)
def test_record_of_a_job_with_other_types_is_an_error_that_names_the_line(
    tmp_path: Path, change: dict[str, object]
) -> None:
    run = sent(tmp_path).run_dir
    path = run / "slurm" / "jobs.jsonl"
    good = path.read_text()
    path.write_text(good + json.dumps(json.loads(good) | change) + "\n" + good)
    with pytest.raises(UserError, match=r"jobs\.jsonl:2: not the record of a job .*; remove the line"):
        book.latest(run)


def test_half_a_record_of_a_job_is_passed_over_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    run = sent(tmp_path).run_dir
    path = run / "slurm" / "jobs.jsonl"
    record, good = book.latest(run), path.read_text()
    path.write_text(json.dumps(json.loads(good) | {"of": "a later program"}) + "\n" + good[:40])
    assert book.records(run) == [record]
    book.record(run, record)
    assert book.records(run) == [record, record]
    path.write_text(good.removesuffix("\n"))  # all but its end
    assert book.records(run) == [record]
    for text in ("{\n", f"{good}{{\n", f"{good}[]\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"jobs\.jsonl:\d: not the record of a job"):
            book.latest(run)
