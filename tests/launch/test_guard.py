"""The guard on another node: patient while the supervisor's node lives, and stubborn once it is gone."""

import time
from pathlib import Path

import pytest

from hpc_rollart.config.cluster import load_cluster
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book, events
from hpc_rollart.jobs.book import JobRecord
from hpc_rollart.jobs.commands import SlurmError
from hpc_rollart.launch import guard
from hpc_rollart.launch.allocation import Allocation, Group, JobFacts
from hpc_rollart.launch.guard import Guarded
from hpc_rollart.launch.slurm import Unconfirmed
from hpc_rollart.observe.status import read_status
from tests.launch.conftest import make_config

Patch = pytest.MonkeyPatch
TOKEN = "h1-77-0"
DONE = ["replace 7", "scancel 7"]


class Site:
    """A cluster in which time passes in sleep only.

    Attributes
    ----------
    beats
        How often the supervisor still shows a sign of life.
    answers
        Whether its node answers, one entry a question; the last one holds on.
    states
        What Slurm says of the job, one entry a question; the last one holds on.
    refuses
        Errors with which the next submissions and commands fail.
    did
        What Slurm was asked to do.
    """

    def __init__(self, run: Path, beats: int) -> None:
        self.now, self.run, self.beats = 0.0, run, beats
        self.leaves_at = float("inf")
        self.answers = [False]
        self.states: list[str | SlurmError] = ["RUNNING"]
        self.refuses: list[SlurmError] = []
        self.asked = 0
        self.did: list[str] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert self.now < 5000, "the guard never ends"
        self.now += seconds
        alive = self.run / "slurm" / "alive"
        if self.beats > 0:
            self.beats -= 1
            alive.write_text(f"{TOKEN} {self.now}\n")
        if self.now >= self.leaves_at:
            alive.unlink(missing_ok=True)

    def answer(self, _job: str, _group: int, host: str, wait: float) -> bool:
        assert host == "h1"
        self.sleep(wait)
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def facts(self, _job: str) -> JobFacts:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, SlurmError):
            raise state
        return JobFacts(state, None)

    def command(self, command: list[str]) -> str:
        if self.refuses:
            raise self.refuses.pop(0)
        self.did.append(" ".join(command))
        return ""

    def replace(self, run_dir: Path, job: int) -> JobRecord:
        assert run_dir == self.run
        self.command(["replace", str(job)])
        return JobRecord(job=12, submitted=0.0, script="", log="", time_s=60.0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A run directory with its supervisor alive."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "alive").write_text(f"{TOKEN} 0\n")
    config = make_config(tmp_path)
    monkeypatch.setattr(guard, "load_resolved", lambda _: config)
    monkeypatch.setattr(book, "load_resolved_cluster", lambda _: load_cluster("testbed"))
    monkeypatch.setattr(guard.signal, "signal", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


def watch(site: Site, monkeypatch: Patch, restarts: int = 0) -> list[str]:
    """Run the guard to its end; returns the events that it wrote, the oldest first."""
    monkeypatch.setattr(guard, "time", site)
    monkeypatch.setattr(guard, "_answers", site.answer)
    monkeypatch.setattr(guard, "job_facts", site.facts)
    monkeypatch.setattr(guard, "replace", site.replace)
    monkeypatch.setattr(guard.commands, "run", site.command)
    guard.main([str(site.run), "7", str(restarts), "0", "h1", TOKEN])
    return [event.event for event in events.newest_first(site.run)][::-1]


def test_it_leaves_with_the_supervisor(run: Path, monkeypatch: Patch) -> None:
    site = Site(run, beats=100)
    site.leaves_at = 300
    assert watch(site, monkeypatch) == [] and site.did == [] and site.asked == 0


def test_it_leaves_the_job_to_the_supervisor_that_came_after(run: Path, monkeypatch: Patch) -> None:
    (run / "slurm" / "alive").write_text("h1-99-1 5.0\n")
    assert watch(Site(run, beats=0), monkeypatch) == []


def test_a_supervisor_that_is_silent_on_a_node_that_answers_is_left_alone(
    run: Path, monkeypatch: Patch
) -> None:
    site = Site(run, beats=2)
    site.answers, site.leaves_at = [False, True, True], 300  # the first question alone was not answered
    assert watch(site, monkeypatch) == [] and site.did == [] and site.asked > 2


def test_when_the_node_is_gone_another_job_takes_this_ones_place(run: Path, monkeypatch: Patch) -> None:
    site = Site(run, beats=3)
    assert watch(site, monkeypatch) == ["node lost", "replaced"]
    assert site.did == DONE and site.asked == 3
    newest = next(events.newest_first(run))
    assert newest.job == "7" and newest.message == "node h1, which the supervisor was on, is lost"


def test_a_controller_that_is_slow_when_nodes_die_is_asked_again(run: Path, monkeypatch: Patch) -> None:
    site = Site(run, beats=1)
    site.states = ["RUNNING", SlurmError("scontrol: timed out"), "RUNNING"]
    site.refuses = [SlurmError("sbatch: timed out")]
    watch(site, monkeypatch)
    assert site.did == DONE


def test_a_controller_that_stands_still_is_no_dead_node(run: Path, monkeypatch: Patch) -> None:
    site = Site(run, beats=1)
    site.states = [SlurmError("scontrol: timed out"), "RUNNING"]
    site.answers, site.leaves_at = [False, False, True], 300
    assert watch(site, monkeypatch) == [] and site.did == []


def test_a_full_disk_does_not_keep_the_run_from_going_on(run: Path, monkeypatch: Patch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(events, "write", full)
    site = Site(run, beats=1)
    watch(site, monkeypatch)
    assert site.did == DONE


def test_files_that_cannot_be_read_do_not_either(run: Path, monkeypatch: Patch) -> None:
    def damaged(_: Path) -> None:
        raise UserError("cluster.yaml: damaged")

    monkeypatch.setattr(book, "load_resolved_cluster", damaged)
    site = Site(run, beats=1)
    watch(site, monkeypatch)
    assert site.did == DONE


def test_a_submission_that_nobody_confirmed_is_not_made_twice(run: Path, monkeypatch: Patch) -> None:
    site = Site(run, beats=1)
    site.refuses = [Unconfirmed("sbatch: timed out\nthe job may be in the queue all the same")]
    assert watch(site, monkeypatch) == ["node lost", "ends"]
    assert site.did == ["scancel 7"]


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING"])
def test_a_component_that_is_left_behind_when_the_job_breaks_apart_is_ended(
    run: Path, monkeypatch: Patch, state: str
) -> None:
    site = Site(run, beats=1)
    site.states = [state]
    assert watch(site, monkeypatch) == ["node lost", "ends"]
    assert site.did == ["scancel 7"]
    status = read_status(run)
    assert status is not None and status["state"] == "failed" and "hpc-rollart resubmit" in status["message"]


def test_where_no_other_may_come_it_is_ended_and_the_run_says_why(run: Path, monkeypatch: Patch) -> None:
    site = Site(run, beats=1)
    site.refuses = [SlurmError("scancel: timed out")]
    assert watch(site, monkeypatch, restarts=100) == ["node lost", "ends"]
    assert site.did == ["scancel 7"]
    status = read_status(run)
    assert status is not None and status["state"] == "failed"
    assert "h1" in status["message"] and "launch.max_requeues" in status["message"]


def test_a_run_that_is_being_cancelled_stays_so(run: Path, monkeypatch: Patch) -> None:
    book.mark_cancelled(run, 7)
    site = Site(run, beats=1)
    watch(site, monkeypatch)
    status = read_status(run)
    assert site.did == ["scancel 7"] and status is not None and status["state"] == "interrupted"


class Step:
    """Takes the place of a step in Slurm."""

    made: list["Step"]

    def __init__(self, _name: str, _job: str, _group: int, host: str, command: list[str]) -> None:
        self.host, self.command, self.over, self.ended = host, command, False, False
        Step.made.append(self)

    def end(self) -> None:
        self.ended = True


def test_the_supervisor_shows_signs_of_life_and_has_a_guard_on_a_node_that_lives(
    run: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(guard, "SideStep", Step)
    monkeypatch.setattr(guard, "_BEAT_S", 0.01)
    Step.made = []
    alive = run / "slurm" / "alive"
    groups = (Group("trainer", 0, ("h1",)), Group("generate", 1, ("g1",)), Group("env", 2, ("c1", "c2")))
    whole = Allocation("7", groups)
    with Guarded(run, whole, "python") as guarded:
        guarded.on(whole)
        guarded.on(whole)
        assert [step.host for step in Step.made] == ["c2"]
        guarded.on(whole.without(["c2"]))
        assert [(step.host, step.ended) for step in Step.made] == [("c2", True), ("c1", False)]
        Step.made[-1].over = True
        guarded.on(whole.without(["c2"]))
        assert len(Step.made) == 3
        token, seen, until = Step.made[0].command[-1], set(), time.monotonic() + 30
        while len(seen) < 3 and time.monotonic() < until:
            text = alive.read_text() if alive.exists() else ""
            seen |= {text} if text.startswith(token) else set()
            time.sleep(0.005)
        assert len(seen) == 3
    assert Step.made[-1].ended and not alive.exists()
    with Guarded(run, whole, "python") as guarded:
        guarded.on(Allocation("7", (Group("all", -1, ("h1",)),)))  # nobody is there who could
    assert len(Step.made) == 3
