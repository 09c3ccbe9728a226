"""Whether a job requeues itself, and what is left of a job when nodes are gone; Slurm's answers are given."""

from pathlib import Path
from typing import Any

import pytest

from hpc_rollart.config.cluster import load_cluster
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book
from hpc_rollart.jobs import events as events_of
from hpc_rollart.jobs.book import JobRecord
from hpc_rollart.jobs.commands import SlurmError
from hpc_rollart.launch import requeue, supervisor
from hpc_rollart.launch.allocation import Allocation, AllocationError, Group, JobFacts
from hpc_rollart.launch.supervisor import Supervisor
from tests.launch.conftest import make_config

Patch = pytest.MonkeyPatch


def make(tmp_path: Path, monkeypatch: Patch, state: str = "RUNNING", **choices: Any) -> Supervisor:
    """A supervisor in a job of three components that Slurm says is in `state`."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(requeue, "job_facts", lambda _: JobFacts(state, None))
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    made = Supervisor(tmp_path / "run", ())
    made.config = make_config(tmp_path, **choices.pop("launch", {}))
    made.cluster = load_cluster("testbed").model_copy(update=choices.pop("cluster", {}))
    hosts = {"env": ("c1",), "trainer": ("h1",), "generate": ("g1", "g2")}
    groups = tuple(Group(name, i, hosts[name], str(7 + i)) for i, name in enumerate(hosts))
    made.allocation = Allocation("7", groups, choices.pop("restarts", 0))
    return made


def events(made: Supervisor) -> str:
    return (made.run_dir / "slurm" / "events.jsonl").read_text()


def test_a_running_job_requeues_itself(tmp_path: Path, monkeypatch: Patch) -> None:
    made = make(tmp_path, monkeypatch)
    assert made._leave("received USR1").requeue
    assert "requeued" in events(made)


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING", "TIMEOUT", ""])
def test_a_job_that_slurm_has_ended_does_not(tmp_path: Path, monkeypatch: Patch, state: str) -> None:
    made = make(tmp_path, monkeypatch, state)
    end = made._leave("received TERM")
    assert not end.requeue and "Slurm has ended the job itself" in end.message


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"cluster": {"requeue": False}}, "requeue: false"),
        ({"restarts": 2, "launch": {"max_requeues": 2}}, "launch.max_requeues"),
    ],
)
def test_limits_of_profile_and_config_hold_and_say_how_to_go_on(
    tmp_path: Path, monkeypatch: Patch, choices: dict[str, Any], why: str
) -> None:
    end = make(tmp_path, monkeypatch, **choices)._leave("received USR1")
    assert not end.requeue and why in end.message and "hpc-rollart resubmit" in end.message


def test_a_cancelled_run_does_not_come_back(tmp_path: Path, monkeypatch: Patch) -> None:
    made = make(tmp_path, monkeypatch)
    book.mark_cancelled(made.run_dir, 7)
    assert not made._leave("received TERM").requeue


def test_a_controller_that_does_not_answer_is_no_reason_to_requeue_blindly(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    made = make(tmp_path, monkeypatch)

    def away(_: str) -> JobFacts:
        raise SlurmError("scontrol has not answered")

    monkeypatch.setattr(requeue, "job_facts", away)
    end = made._leave("received USR1")
    assert not end.requeue and "scontrol has not answered" in end.message


def test_a_component_whose_only_node_is_gone_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    made = make(tmp_path, monkeypatch)
    made.lost = {"h1": "no answer within 20 s"}
    assert made._short_of_nodes(made.allocation.without(["h1"])) == "trainer"
    missing = made._why_short("trainer")
    assert "component trainer" in missing and "h1: no answer" in missing
    assert not made._short_of_nodes(made.allocation.without(["g1"]))
    assert made._shrunk(made.allocation.without(["g1"])) == {}  # the config asks for one node anyway


def test_what_is_no_job_or_another_one_is_said(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(UserError, match="no Slurm job"):
        Allocation.of_this_job(config, {})
    with pytest.raises(AllocationError, match=r"2 components, the config has 3 \(env, trainer, generate\)"):
        Allocation.of_this_job(config, {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"})
    with pytest.raises(AllocationError, match="component env: job 7 has 0 nodes"):
        Allocation.of_this_job(config, {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3"})


@pytest.mark.parametrize(
    ("choices", "why"),
    [({}, ""), ({"restarts": 99}, "launch.max_requeues"), ({"slurm": "Access denied"}, "Access denied")],
)
def test_in_place_of_a_job_with_a_lost_node_that_slurm_does_not_take_back_comes_another(
    tmp_path: Path, monkeypatch: Patch, choices: dict[str, Any], why: str
) -> None:
    refusal = choices.pop("slurm", "")
    made = make(tmp_path, monkeypatch, **choices)
    made.say("replaced", by=6)  # the hundredth time with `restarts`

    def refuse(*_: Any) -> None:
        raise SlurmError("scontrol: Invalid node name specified")

    def submit(run_dir: Path, job: int) -> JobRecord:
        assert (run_dir, job) == (made.run_dir, 7)
        if refusal:
            raise SlurmError(refusal)
        return JobRecord(job=12, submitted=0.0, script="", log="", time_s=60.0)

    monkeypatch.setattr(supervisor, "give_back", refuse)
    monkeypatch.setattr(supervisor, "replace", submit)
    made._give_back(made.allocation.groups[2], ("g2",))
    end = made._start_anew(made._stuck)
    assert not end.requeue and "node g1 of component generate is lost" in end.message
    assert why in end.message and end.state == ("failed" if why else "interrupted")
    assert ('"by": 12' in events(made)) == (not why)


def test_half_an_event_of_a_supervisor_that_was_killed_ends_no_later_job(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    made = make(tmp_path, monkeypatch)
    made.say("job starts", step=4)
    with open(made.run_dir / "slurm" / "events.jsonl", "a") as file:
        file.write('{"t": 1.0, "ev')
    made.say("job starts", step=5)
    assert [event.step for event in events_of.newest_first(made.run_dir)] == [5, 4]


@pytest.mark.parametrize(("by", "restarts", "refused"), [(7, 0, True), (6, 0, False), (6, 1, True)])
def test_jobs_that_come_by_themselves_and_get_nothing_done_end(
    tmp_path: Path, monkeypatch: Patch, by: int, restarts: int, refused: bool
) -> None:
    made = make(tmp_path, monkeypatch, restarts=restarts)
    for _ in range(made.config.launch.restart.attempts + 1):
        made.say("job starts", step=0)
        made.say("replaced", by=by)
    said = made._idle_jobs()
    assert ("jobs in a row began at step 0 and got no checkpoint further" in said) == refused
