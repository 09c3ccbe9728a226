"""Environments that raise, hang or die cost their own trajectories and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end import independent
from tests.end_to_end.conftest import Run, base_config, complete

FAULTY = "tests.rollout.faulty_envs"

# Long enough that the last batch, which has to wait until a hanging group is given up, counts for little.
STEPS = 60

# Environment latency, not this machine's speed, sets the pace of every task: 2 turns of 0.2 s and a reset.
LATENCY = {"turns": 2, "latency_s": 0.2}


def mixed(faulty: bool) -> dict[str, Any]:
    """Four equal tasks; three of them raise, hang or kill their worker if `faulty`."""
    config = base_config()
    config["run"]["steps"] = STEPS
    config["algorithm"] |= {"group_size": 4, "groups_per_batch": 2}
    # As by default but for the first back-off; a task that only fails then soon rests for long.
    config["schedule"] = {"retry": {"attempts": 2, "backoff_s": 0.5, "backoff_max_s": 60.0}}
    config["components"]["env"]["slots"] = 64
    steady = {"env": f"{FAULTY}:Steady", "args": LATENCY, "max_turns": 4, "sampling": {"max_tokens": 2},
              "timeouts": {"reset_s": 20.0, "step_s": 1.0}}  # fmt: skip
    faults = {"raises": "RaisesOnThirdReset", "hangs": "SleepsForEver", "dies": "KillsItself"}
    others = [
        steady | ({"name": name, "env": f"{FAULTY}:{env}"} if faulty else {"name": name})
        for name, env in faults.items()
    ]
    # Half of all groups are the steady task's, whatever becomes of the others.
    config["tasks"] = [steady | {"name": "steady", "weight": 3.0}, *others]
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Run]:
    """The same run with and without the faults."""
    out = {}
    for faulty in (False, True):
        out[faulty] = complete(mixed(faulty), tmp_path_factory.mktemp(f"faulty-{faulty}"))
        assert out[faulty].code == 0, out[faulty].output
    return out


def rate(run: Run, task: str) -> float:
    """Finished trajectories of `task` a second, from the first admission to the last step."""
    table, codes = independent.rows(run.path)
    end = run.metrics()[-1]["t"]
    mine = table[(table["task"] == codes["task"].index(task)) & (table["status"] == 0)]
    mine = mine[mine["t_finished"] <= end]
    return len(mine) / (end - table["t_admitted"].min())


def test_the_run_completes_all_its_steps(runs: dict[bool, Run]) -> None:
    assert [line["step"] for line in runs[True].metrics()] == list(range(STEPS))


def test_the_steady_task_keeps_its_trajectory_rate(runs: dict[bool, Run]) -> None:
    assert rate(runs[True], "steady") >= 0.85 * rate(runs[False], "steady")


@pytest.mark.parametrize(
    ("task", "stop", "reason"),
    [
        ("raises", "reset_error", "ConnectionRefusedError"),
        ("hangs", "step_timeout", "no answer within 1 s"),
        ("dies", "worker_died", "killed by signal 9"),
    ],
)
def test_every_failure_is_a_row_with_its_reason(
    runs: dict[bool, Run], task: str, stop: str, reason: str
) -> None:
    table, codes = independent.rows(runs[True].path)
    failed = table[
        (table["task"] == codes["task"].index(task))
        & (table["status"] == codes["status"].index("env_failed"))
    ]
    assert len(failed) > 0
    assert {codes["stop"][code] for code in failed["stop"]} == {stop}
    assert all(np.isnan(failed["reward"]))
    texts = independent.texts(runs[True].path)
    assert all(reason in texts[int(row["trajectory"])]["info"]["reason"] for row in failed)


def test_failures_are_counted_and_never_trained_on(runs: dict[bool, Run]) -> None:
    run = runs[True]
    table, _ = independent.rows(run.path)
    used = set(independent.consumed(run.path)["trajectory"].tolist())
    assert {int(row["status"]) for row in table if int(row["trajectory"]) in used} == {0}
    assert run.metrics()[-1]["counts"]["env_failed"] > 0


def test_no_failure_happens_without_faulty_environments(runs: dict[bool, Run]) -> None:
    assert independent.status_counts(runs[False].path)["env_failed"] == 0


def test_a_run_all_of_whose_environments_hang_fails_and_says_what_it_waited_for(tmp_path: Path) -> None:
    config = mixed(True)
    config["tasks"] = [config["tasks"][2]]
    config["launch"] = {"stall_deadline_s": 8.0}
    config["tasks"][0]["timeouts"] = {"reset_s": 20.0, "step_s": 60.0}
    run = complete(config, tmp_path)
    assert run.code == 3
    assert "batch 0 needs 2 complete groups and has 0" in run.output
