"""The log of consumed trajectories is on disk step by step."""

from pathlib import Path

import numpy as np
import pytest

from hpc_rollart.store.batches import BatchWriter
from hpc_rollart.store.files import StoreError
from hpc_rollart.store.reader import open_run, read_consumed
from hpc_rollart.store.schema import CONSUMED
from tests.store.records import open_writer, record


def test_every_step_is_readable_as_soon_as_it_is_appended(tmp_path: Path):
    with BatchWriter(tmp_path, run_id="r", attempt=0) as log:
        for step in range(1, 4):
            log.append(step, step - 1, [step, 10 + step], [step, step], [0, 1], [0.5, -0.5])
            rows = read_consumed(log.path)
            assert rows["step"].tolist() == [s for s in range(1, step + 1) for _ in range(2)]
    expected = np.array([(3, 3, 3, 0, 0.5, 2), (3, 13, 3, 1, -0.5, 2)], CONSUMED)
    assert (rows[-2:] == expected).all()


def test_one_attempt_has_one_batch_log(tmp_path: Path):
    with BatchWriter(tmp_path, run_id="r", attempt=0), pytest.raises(StoreError, match="attempt 0"):
        BatchWriter(tmp_path, run_id="r", attempt=0)


def test_columns_of_different_length_are_refused(tmp_path: Path):
    with BatchWriter(tmp_path, run_id="r", attempt=0) as log, pytest.raises(ValueError, match="step 1"):
        log.append(1, 0, [1, 2], [1, 1], [0, 0], [0.0])


def test_attempts_are_read_in_the_order_they_ran_and_joined_to_their_rows(tmp_path: Path):
    with open_writer(tmp_path) as shard:
        for trajectory in range(4):
            shard.append(record(trajectory))
    for attempt in (10, 2):
        with BatchWriter(tmp_path / "batches", run_id="r", attempt=attempt) as log:
            log.append(attempt, 0, [attempt % 4, 99], [0, 0], [0, 0], [0.0, 0.0])
    consumed, found, rows = open_run(tmp_path).consumed_rows()
    assert consumed["step"].tolist() == [2, 2, 10, 10]
    assert found.tolist() == [True, False, True, False]
    assert rows["trajectory"][found].tolist() == [2, 2]
