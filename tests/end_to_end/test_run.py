"""One small run from the command line to the files, read back with h5py alone."""

import json

import numpy as np
import pytest

from tests.end_to_end import independent
from tests.end_to_end.conftest import Run, base_config, complete


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small asynchronous run."""
    finished = complete(base_config(), tmp_path_factory.mktemp("run"))
    assert finished.code == 0, finished.output
    return finished


def test_every_step_has_its_line_and_the_state_is_done(run: Run) -> None:
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3]
    assert run.status()["state"] == "done"


def test_rewards_recounted_from_the_shards_are_those_of_the_metrics(run: Run) -> None:
    recounted = independent.rewards_by_step(run.path)
    assert recounted == pytest.approx({line["step"]: line["reward_mean"] for line in run.metrics()})


def test_no_trajectory_is_consumed_older_than_alpha_or_twice(run: Run) -> None:
    log, starts = independent.consumed(run.path), independent.first_versions(run.path)
    ages = log["version"] - np.array([starts[int(t)] for t in log["trajectory"]])
    assert np.array_equal(ages, log["staleness"])
    assert ages.min() >= 0 and ages.max() <= 1
    assert len(np.unique(log["trajectory"])) == len(log)
    _, sizes = np.unique(log["group"], return_counts=True)
    assert set(sizes) == {2}


def test_each_started_trajectory_has_exactly_one_row(run: Run) -> None:
    table, codes = independent.rows(run.path)
    started = sorted(int(row["trajectory"]) for row in table)
    assert started == list(range(len(started)))
    counts = independent.status_counts(run.path)
    assert counts["ok"] == len(independent.consumed(run.path))
    assert codes["task"] == ["steady"] and codes["pool"] == ["compute", "bandwidth"]


def test_tasks_go_to_the_pool_they_name(run: Run) -> None:
    table, codes = independent.rows(run.path)
    assert {codes["pool"][pool] for pool in table["pool"]} == {"compute"}


def test_every_sampled_token_carries_a_version_and_a_log_prob_and_no_other_does(run: Run) -> None:
    for tokens in independent.tokens_of(run.path).values():
        sampled = tokens["sampled"] == 1
        assert (tokens["version"][sampled] >= 0).all() and (tokens["version"][~sampled] == -1).all()
        assert np.isfinite(tokens["logprob"][sampled]).all() and np.isnan(tokens["logprob"][~sampled]).all()


def test_weights_arrive_while_the_run_goes_on(run: Run) -> None:
    starts = independent.first_versions(run.path)
    assert max(starts.values()) >= 2


def test_the_run_leaves_its_report_its_checkpoint_and_a_log_of_each_rank(run: Run) -> None:
    assert "<html" in (run.path / "report.html").read_text()
    latest = (run.path / "checkpoints" / "LATEST").read_text().strip()
    assert latest == "step-000004"
    assert (run.path / "checkpoints" / latest / "model.safetensors").is_file()
    logs = {path.stem for path in (run.path / "logs" / "0").glob("*-?.log")}
    assert logs == {"trainer-0", "generate-compute-1", "generate-bandwidth-2", "env-3", "env-4"}
    assert json.loads((run.path / "manifest.json").read_text())["run_id"]


def test_no_file_of_the_run_can_be_read_by_others(run: Run) -> None:
    assert run.path.stat().st_mode & 0o077 == 0
