"""The three schedules come from the same code, and `alpha: 0` is synchronous training."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.end_to_end import independent
from tests.end_to_end.conftest import Run, base_config, complete


def scheduled(schedule: dict[str, Any]) -> dict[str, Any]:
    """A deterministic small run under `schedule`, with two tasks on two pools."""
    config = base_config()
    config["run"]["steps"] = 3
    config["engine"] = {"deterministic": True}
    config["schedule"] = schedule
    arithmetic = {
        "name": "sums", "env": "reasoning-gym", "affinity": "bandwidth", "max_turns": 1,
        "args": {"task": "chain_sum"}, "sampling": {"max_tokens": 6},
    }  # fmt: skip
    config["tasks"].append(arithmetic)
    return config


def what_was_trained(run: Run) -> tuple[list[tuple[Any, ...]], list[float], dict[int, Any]]:
    """The batch log, the losses and the tokens: everything that decides the policy."""
    log = [tuple(row) for row in independent.consumed(run.path).tolist()]
    losses = [line["loss"] for line in run.metrics()]
    used = {int(t) for t in independent.consumed(run.path)["trajectory"]}
    tokens = {t: columns for t, columns in independent.tokens_of(run.path).items() if t in used}
    return log, losses, tokens


def test_alpha_zero_equals_sync_seed_for_seed(tmp_path: Path) -> None:
    runs = []
    for name, schedule in {"alpha0": {"mode": "async", "alpha": 0}, "sync": {"mode": "sync"}}.items():
        folder = tmp_path / name
        folder.mkdir()
        run = complete(scheduled(schedule), folder)
        assert run.code == 0, run.output
        runs.append(what_was_trained(run))
    (log, losses, tokens), (sync_log, sync_losses, sync_tokens) = runs
    assert log == sync_log
    assert losses == sync_losses
    assert tokens.keys() == sync_tokens.keys()
    for trajectory, columns in tokens.items():
        for name, values in columns.items():
            np.testing.assert_array_equal(values, sync_tokens[trajectory][name])


def test_sync_trains_only_on_what_the_current_version_sampled(tmp_path: Path) -> None:
    run = complete(scheduled({"mode": "sync"}), tmp_path)
    assert run.code == 0, run.output
    assert set(independent.consumed(run.path)["staleness"]) == {0}


def test_one_off_works_exactly_one_batch_ahead(tmp_path: Path) -> None:
    run = complete(scheduled({"mode": "one_off"}), tmp_path)
    assert run.code == 0, run.output
    log = independent.consumed(run.path)
    assert [set(log["staleness"][log["step"] == step]) for step in range(3)] == [{0}, {1}, {1}]
    # No trajectory mixes versions: weights are installed when the generators have drained.
    for tokens in independent.tokens_of(run.path).values():
        assert len(np.unique(tokens["version"][tokens["sampled"] == 1])) <= 1


def test_redundant_work_is_cancelled_as_surplus(tmp_path: Path) -> None:
    run = complete(scheduled({"mode": "sync", "redundancy": {"groups": 1, "members": 1}}), tmp_path)
    assert run.code == 0, run.output
    counts = independent.status_counts(run.path)
    assert counts["surplus"] > 0
    assert counts["ok"] == len(independent.consumed(run.path)) == 3 * 4
