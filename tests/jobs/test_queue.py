"""What Slurm says of a job, in the words of several versions, and how seldom it is asked."""

from datetime import datetime

import pytest

from hpc_rollart.jobs.commands import CommandMissing, SlurmError
from hpc_rollart.jobs.queue import (
    PHASES,
    JobState,
    Part,
    Phase,
    Queue,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    phase_of,
)
from hpc_rollart.jobs.reasons import explain_reason
from tests.launch.site import FakeClock, FakeSlurm, refused

# As Slurm 22.05 writes them.
SQUEUE_RUNNING = """\
1008+0|RUNNING|cpu|1|1:48|2026-12-01T01:10:25|cpu-1|None
1008+1|RUNNING|h20|2|1:48|2026-12-01T01:10:25|h20-[1-2]|None
"""
SQUEUE_PENDING = """\
1009+1|PENDING|h20|2|2-00:00:00|N/A||Resources
1009+0|PENDING|cpu|1|2-00:00:00|2026-12-01T09:00:00||ReqNodeNotAvail, UnavailableNodes:h100-1
"""
SQUEUE_ENDED = """\
1008+0|TIMEOUT|cpu|1|INVALID|2026-12-01T01:10:25|cpu-1|TimeLimit
1008+1|TIMEOUT|h20|1|INVALID|2026-12-01T01:10:25|h20-1|TimeLimit
"""
SACCT = """\
1008+0|CANCELLED by 1000|gpu-h100|1|2026-11-30T22:00:01|n0012
1008+1|COMPLETED|standard|2|2026-11-30T22:00:01|c[004-005]
"""
SACCT_WITH_STEPS = """\
81|NODE_FAIL|gpu|1|2025-01-02T03:04:05|n1
81.batch|FAILED||1|2025-01-02T03:04:05|n1
81|PENDING|gpu|1|Unknown|None assigned
"""
SCONTROL_22 = (
    "JobId=1012 HetJobId=1012 HetJobOffset=0 JobName=a job HetJobIdSet=1012-1013 UserId=root(0) "
    "MCS_label=N/A Priority=4294901748 Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:11 "
    "TimeLimit=00:10:00 TimeMin=N/A SubmitTime=2026-12-01T01:10:25 StartTime=2026-12-01T01:10:26 "
    "EndTime=2026-12-01T01:20:26 Partition=low AllocNode:Sid=localhost:21161 ReqNodeList=cpu-1 "
    "NodeList=cpu-1 BatchHost=cpu-1 NumNodes=1 NumCPUs=6 Features=(null) Command=/x y/job.sh Power= \n"
    "JobId=1013 HetJobId=1012 HetJobOffset=1 JobName=a job JobState=RUNNING Reason=None "
    "Requeue=1 Restarts=2 StartTime=2026-12-01T01:10:26 Partition=low NodeList=h20-2 NumNodes=1 Power= \n"
)
SCONTROL_24 = (
    "JobId=77 JobName=x UserId=me(1000) JobState=PENDING Reason=BeginTime FailedNode=n3 Requeue=1 "
    "Restarts=1 BatchFlag=1 StartTime=Unknown Partition=gpu,gpu-long NodeList= NumNodes=2-2\n"
)


def test_squeue_gives_every_component_in_order() -> None:
    first, second = parse_squeue(SQUEUE_RUNNING)
    assert (second.offset, second.state, second.partition, second.nodes) == (1, "RUNNING", "h20", 2)
    assert (second.node_list, second.time_left_s, second.reason) == ("h20-[1-2]", 108.0, "")
    assert first.start == datetime(2026, 12, 1, 1, 10, 25).timestamp()


def test_squeue_gives_reasons_whatever_is_in_them_and_start_estimates() -> None:
    first, second = parse_squeue(SQUEUE_PENDING)
    assert first.reason == "ReqNodeNotAvail, UnavailableNodes:h100-1"
    assert first.start is not None and second.start is None
    assert first.time_left_s == 172800.0


def test_ended_job_has_no_time_left() -> None:
    parts = parse_squeue(SQUEUE_ENDED)
    assert [part.time_left_s for part in parts] == [None, None]
    assert JobState(tuple(parts)).phase is Phase.ENDED
    assert JobState(tuple(parts)).ended_as == "TIMEOUT"


@pytest.mark.parametrize("left", ["UNLIMITED", "NOT_SET", "INVALID", "N/A", ""])
def test_time_left_that_is_no_time_is_none(left: str) -> None:
    (part,) = parse_squeue(f"5|RUNNING|p|1|{left}|N/A|n1|None\n")
    assert part.time_left_s is None


def test_output_in_another_form_is_passed_over() -> None:
    assert parse_squeue("slurm says hello\n\n5|RUNNING\n") == []
    assert parse_sacct("hello\n") == []
    assert parse_scontrol("No jobs in the system\n") == JobState()


def test_sacct_gives_jobs_without_their_steps_and_the_last_of_a_requeued_one() -> None:
    state = JobState(tuple(parse_sacct(SACCT)))
    assert [part.phase for part in state.parts] == [Phase.ENDED, Phase.ENDED]
    assert state.ended_as == "CANCELLED"
    (part,) = parse_sacct(SACCT_WITH_STEPS)
    assert (part.state, part.node_list, part.start) == ("PENDING", "", None)


def test_scontrol_gives_components_and_restarts_of_old_and_new_versions() -> None:
    state = parse_scontrol(SCONTROL_22)
    assert [(part.offset, part.node_list) for part in state.parts] == [(0, "cpu-1"), (1, "h20-2")]
    assert state.restarts == 2
    state = parse_scontrol(SCONTROL_24)
    assert (state.phase, state.restarts, state.parts[0].nodes) == (Phase.WAITING, 1, 2)
    assert (state.parts[0].reason, state.parts[0].partition) == ("BeginTime", "gpu,gpu-long")


# --- states ------------------------------------------------------------------------------------------

# The list of squeue's manual page.
ALL = """
BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED
RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT
STOPPED SUSPENDED TIMEOUT
"""


@pytest.mark.parametrize("state", ALL.split())
def test_every_state_of_slurm_is_known(state: str) -> None:
    assert phase_of(state) is PHASES[state] is not Phase.UNKNOWN
    assert phase_of(state.lower()) is PHASES[state]


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("CANCELLED by 1000", Phase.ENDED),
        ("CANCELLED+", Phase.ENDED),
        ("OUT_OF_ME+", Phase.ENDED),
        ("COMPLETI+", Phase.ENDING),
        ("COMPLET+", Phase.UNKNOWN),  # COMPLETED or COMPLETING
        ("EXPEDITING", Phase.UNKNOWN),
        ("", Phase.UNKNOWN),
    ],
)
def test_cut_and_unknown_states(text: str, phase: Phase) -> None:
    assert phase_of(text) is phase


def test_unknown_state_counts_as_still_there() -> None:
    assert JobState((Part(0, "EXPEDITING"), Part(1, "COMPLETED"))).there


@pytest.mark.parametrize(
    ("states", "phase"),
    [
        (("PENDING", "PENDING"), Phase.WAITING),
        (("RUNNING", "RUNNING"), Phase.RUNNING),
        (("COMPLETED", "RUNNING"), Phase.RUNNING),
        (("COMPLETED", "COMPLETING"), Phase.ENDING),
        (("COMPLETED", "FAILED"), Phase.ENDED),
        ((), Phase.ENDED),
    ],
)
def test_job_stands_where_its_last_component_stands(states: tuple[str, ...], phase: Phase) -> None:
    assert JobState(tuple(Part(i, state) for i, state in enumerate(states))).phase is phase


# --- asking ------------------------------------------------------------------------------------------


def test_slurm_is_asked_every_five_seconds_at_most() -> None:
    clock, slurm = FakeClock(), FakeSlurm(squeue=SQUEUE_RUNNING)
    queue = Queue(1008, slurm, clock)
    for _ in range(100):
        assert queue.state().phase is Phase.RUNNING
        clock.sleep(0.1)
    assert len(slurm.asked) == 2  # at 0 s and at 5 s


def test_a_refusal_is_not_asked_again_at_once_either() -> None:
    clock, slurm = FakeClock(), FakeSlurm(squeue=refused("squeue", "Unable to contact slurm controller"))
    queue = Queue(1, slurm, clock)
    for _ in range(4):
        with pytest.raises(SlurmError, match="try again in a while"):
            queue.state()
        clock.sleep(1.0)
    assert len(slurm.asked) == 1
    slurm.answers["squeue"] = SQUEUE_RUNNING
    clock.sleep(1.0)
    assert queue.state().there


def test_job_that_squeue_no_longer_lists_is_looked_up_in_the_accounting() -> None:
    slurm = FakeSlurm(sacct=SACCT)
    assert Queue(1008, slurm).state().ended_as == "CANCELLED"
    assert slurm.names() == ["squeue", "sacct"]


def test_without_accounting_scontrol_is_asked_and_sacct_never_again() -> None:
    clock, slurm = FakeClock(), FakeSlurm(squeue="", scontrol=SCONTROL_22.replace("RUNNING", "FAILED"))
    queue = Queue(1012, slurm, clock)
    assert queue.state().ended_as == "FAILED"
    clock.sleep(5)
    queue.state()
    assert slurm.names() == ["squeue", "sacct", "scontrol", "squeue", "scontrol"]


def test_job_that_nobody_knows_ended_a_while_ago() -> None:
    state = Queue(1, FakeSlurm()).state()
    assert (state.there, state.known, state.ended_as) == (False, False, "")


def test_no_answer_is_an_error_and_not_an_ended_job() -> None:
    for said in ("Socket timed out on send/recv operation", "Unable to contact slurm controller"):
        with pytest.raises(SlurmError):
            Queue(1, FakeSlurm(squeue=refused("squeue", f"slurm_load_jobs error: {said}"))).state()
    with pytest.raises(CommandMissing):
        Queue(1, FakeSlurm(squeue=CommandMissing("no squeue here"))).state()


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("Resources", "free"),
        ("ReqNodeNotAvail, UnavailableNodes:h100-1", "down or reserved"),
        ("PartitionDown", "partition is down"),
        ("PartitionTimeLimit", "never start"),
        ("QOSMaxJobsPerUserLimit", "QOS"),
        ("AssocGrpCPUMinutesLimit", "account"),
        ("DependencyNeverSatisfied", "never start"),
        ("launch failed requeued held", "held"),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_reasons_are_said_in_plain_words(reason: str, part: str) -> None:
    assert part in explain_reason(reason)
