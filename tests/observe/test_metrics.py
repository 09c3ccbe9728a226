"""Metrics are whole JSON lines and TensorBoard scalars; the status file is never half-written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_rollart.errors import UserError
from hpc_rollart.observe.metrics import MetricsWriter
from hpc_rollart.observe.status import StatusFile, read_status
from hpc_rollart.observe.steps import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[2]
LINE = {"step": 1, "loss": 0.5, "reward": {"frozen-lake": 0.25, "chain-sum": None}, "grad_norm": math.nan}


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(LINE)
        metrics.write({"step": 2, "loss": np.float32(0.25), "staleness_hist": {0: 3}})
        lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == LINE | {"grad_norm": None}
    assert lines[1] == {"step": 2, "loss": 0.25, "staleness_hist": {"0": 3}}


def test_nested_numbers_become_tensorboard_tags_and_nan_none(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(LINE)
        metrics.write(LINE | {"step": 2, "loss": math.inf})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()["tensors"] or events.Tags()["scalars"]
    assert set(tags) == {"loss", "reward/frozen-lake"}
    series = events.Tensors("loss") if events.Tags()["tensors"] else events.Scalars("loss")
    assert [event.step for event in series] == [1]


def test_lines_are_read_back_without_the_torn_last_one(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(LINE)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    assert read_metrics(tmp_path / "missing") == []


def test_a_value_that_metrics_cannot_hold_is_refused(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics, pytest.raises(NotImplementedError, match="object"):
        metrics.write({"step": 1, "loss": object()})


def test_the_status_file_is_replaced_whole(tmp_path: Path):
    assert read_status(tmp_path) is None
    status = StatusFile(tmp_path)
    for step in range(3):
        status.write({"state": "running", "step": step, "eta_s": math.nan})
        assert read_status(tmp_path) == {"state": "running", "step": step, "eta_s": None}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("package", ["store.writer", "store.reader", "observe.metrics", "analysis.report"])
def test_offline_packages_import_without_torch_or_mpi(package: str):
    program = (
        f"import sys, hpc_rollart.{package}\n"
        "heavy = {'torch', 'mpi4py', 'tensorflow', 'transformers', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_damaged_line_is_one_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 0}\n{\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not the line of a step"):
        read_metrics(tmp_path)


def scalars(run_dir: Path, tag: str) -> list[int]:
    """Steps at which TensorBoard shows a point."""
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [point.step for point in events.Tensors(tag)]


def test_a_later_attempt_cuts_off_what_it_does_anew(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as first:
        for step in range(5):
            first.write({"step": step, "loss": 1.0})
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": 5, "lo')  # as a killed writer leaves it
    with MetricsWriter(tmp_path, step=3) as second:
        assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
        for step in (3, 4):
            second.write({"step": step, "loss": 2.0})
        second.sync()
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [
        (0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)
    ]  # fmt: skip
    assert scalars(tmp_path, "loss") == [0, 1, 2, 3, 4]


def test_an_attempt_that_does_nothing_anew_leaves_every_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as first:
        first.write({"step": 0, "loss": 1.0})
    before = (tmp_path / METRICS_FILE).stat().st_ino
    MetricsWriter(tmp_path, step=1).close()
    assert (tmp_path / METRICS_FILE).stat().st_ino == before
    assert scalars(tmp_path, "loss") == [0]
