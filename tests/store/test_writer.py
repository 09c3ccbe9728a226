"""What is appended is what is read back, through rotation, late status changes and odd content."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_rollart.store import writer as writer_module
from hpc_rollart.store.files import StoreError
from hpc_rollart.store.reader import open_run
from hpc_rollart.store.schema import STATUSES, STOPS
from hpc_rollart.store.writer import TrajectoryRecord, TurnRecord
from tests.store.records import open_writer, record

ARRAYS = {"tokens": "id", "logprobs": "logprob", "versions": "version", "sampled": "sampled"}
SCALARS = {
    field.name
    for field in dataclasses.fields(TrajectoryRecord)
    if field.name not in {*ARRAYS, "status", "stop", "turns", "messages", "info"}
}


def assert_same(run, expected: TrajectoryRecord) -> None:
    rows = run.trajectories()
    (row,) = rows[rows["trajectory"] == expected.trajectory]
    for name in SCALARS:
        np.testing.assert_equal(row[name], getattr(expected, name), err_msg=name)
    assert run.statuses[row["status"]] == expected.status
    assert run.stops[row["stop"]] == expected.stop
    tokens = run.tokens_of(expected.trajectory)
    for ours, column in ARRAYS.items():
        np.testing.assert_array_equal(getattr(tokens, column), getattr(expected, ours))
    turns = run.turns_of(expected.trajectory)
    assert row["turns"] == len(turns) == len(expected.turns)
    assert (turns["trajectory"] == expected.trajectory).all()
    assert turns["turn"].tolist() == list(range(len(turns)))
    for turn, wanted in zip(turns, expected.turns, strict=True):
        for field in dataclasses.fields(wanted):
            assert turn[field.name] == getattr(wanted, field.name)
    text = run.text_of(expected.trajectory)
    assert text == {"messages": expected.messages, "info": expected.info}


floats = st.floats(allow_infinity=True, allow_nan=True)
versions = st.integers(-1, 2**31 - 1)


@st.composite
def ragged_records(draw: st.DrawFn) -> list[TrajectoryRecord]:
    ids = draw(st.lists(st.integers(0, 2**64 - 1), unique=True, min_size=1, max_size=6))
    made = []
    for trajectory in ids:
        length = draw(st.sampled_from([0, 1, 7, 4095, 4096, 4097, 9000]))
        turns = st.builds(
            TurnRecord,
            st.integers(0, 9),
            st.integers(0, 9),
            st.floats(allow_nan=False),
            st.just(0.5),
            st.just(0.25),
        )
        made.append(
            record(
                trajectory % 2**32,
                tokens=length,
                trajectory=trajectory,
                group=draw(st.integers(0, 2**64 - 1)),
                status=draw(st.sampled_from(STATUSES)),
                stop=draw(st.sampled_from(STOPS)),
                start_version=draw(versions),
                end_version=draw(versions),
                reward=draw(floats),
                t_scored=draw(floats),
                pool=draw(st.integers(-1, 1)),
                turns=draw(st.lists(turns, max_size=5)),
                messages=draw(
                    st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}))
                ),
                info=draw(st.dictionaries(st.text(), st.none() | st.booleans() | st.text())),
            )
            if length != 0
            else record(0, tokens=0, trajectory=trajectory, status="env_failed", stop="reset_error")
        )
    return made


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    records=ragged_records(),
    flush_after=st.sets(st.integers(0, 5)),
    filter=st.sampled_from(["gzip", "none"]),
)
def test_ragged_records_come_back_as_they_were_appended(tmp_path_factory, records, flush_after, filter):
    run = tmp_path_factory.mktemp("run")
    with open_writer(run, filter=filter, rotate_mb=0.1) as writer:
        for position, one in enumerate(records):
            writer.append(one)
            if position in flush_after:
                writer.flush()
    data = open_run(run)
    assert len(data.trajectories()) == len(records)
    for one in records:
        assert_same(data, one)


def test_the_default_filter_gives_back_the_same_tokens_in_less_space(tmp_path: Path):
    sizes = {}
    for filter in ("bitshuffle-lz4", "none"):
        with open_writer(tmp_path / filter, filter=filter) as writer:
            for trajectory in range(200):
                writer.append(record(trajectory, tokens=500))
        assert_same(open_run(tmp_path / filter), record(123, tokens=500))
        sizes[filter] = writer.path.stat().st_size
    assert sizes["bitshuffle-lz4"] < 0.6 * sizes["none"]


def test_odd_text_survives(tmp_path: Path):
    odd = record(
        0,
        messages=[{"role": "assistant", "content": "half an emoji \ud83d and a nul \x00"}],
        info={"score": np.float32(0.5), "grid": np.arange(3), "nan": math.nan, "path": Path("x")},
    )
    plain = dataclasses.replace(odd, trajectory=1, messages=[])
    with open_writer(tmp_path) as writer:
        writer.append(odd)
        writer.append(plain)
    data = open_run(tmp_path)
    assert data.messages_of(0) == odd.messages
    assert data.text_of(1)["info"] == {"score": 0.5, "grid": [0, 1, 2], "nan": None, "path": repr(Path("x"))}


def test_shards_rotate_by_size_and_keep_every_row(tmp_path: Path):
    with open_writer(tmp_path, rotate_mb=0.2) as writer:
        for trajectory in range(300):
            writer.append(record(trajectory, tokens=300))
            if trajectory % 20 == 0:
                writer.flush()
    paths = sorted((tmp_path / "trajectories").iterdir())
    assert len(paths) >= 3
    assert {path.name for path in paths} == {f"env-3-{seq}.h5" for seq in range(len(paths))}
    data = open_run(tmp_path)
    assert sorted(data.trajectories()["trajectory"]) == list(range(300))
    assert_same(data, record(0, tokens=300))
    assert_same(data, record(299, tokens=300))


def test_a_status_can_change_while_buffered_on_disk_or_rotated_away(tmp_path: Path):
    rows = 3 * writer_module.ROW_CHUNK
    with open_writer(tmp_path, rotate_mb=0.2) as writer:
        first = writer.path
        for trajectory in range(rows):
            writer.append(record(trajectory))
        writer.flush()
        assert writer.path != first, "the first shard should have been rotated away"
        writer.append(record(rows))
        writer.flush()
        writer.append(record(rows + 1))
        changed = {0: "stale", 300: "surplus", rows - 1: "stale", rows: "surplus", rows + 1: "lost"}
        for trajectory, status in changed.items():
            writer.set_status(trajectory, status)
        writer.flush()
        for data in (open_run(tmp_path), writer.close() or open_run(tmp_path)):
            status = {int(row["trajectory"]): data.statuses[row["status"]] for row in data.trajectories()}
            assert status == {trajectory: changed.get(trajectory, "ok") for trajectory in range(rows + 2)}
    for trajectory in (0, 299, 300, 301, rows - 1):
        assert_same(open_run(tmp_path), record(trajectory, status=changed.get(trajectory, "ok")))


def test_the_status_of_an_unknown_trajectory_is_refused(tmp_path: Path):
    with open_writer(tmp_path) as writer, pytest.raises(KeyError):
        writer.set_status(7, "stale")


def test_a_second_row_for_one_trajectory_is_refused(tmp_path: Path):
    with open_writer(tmp_path) as writer:
        writer.append(record(7))
        with pytest.raises(ValueError, match="trajectory 7 already has its row"):
            writer.append(record(7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, "40 tokens, but 3 logprobs"),
        ({"status": "fine"}, "status 'fine'"),
        ({"stop": "bored"}, "stop 'bored'"),
        ({"task": 2}, "task 2 has no name"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path, changes, message):
    with open_writer(tmp_path) as writer, pytest.raises(ValueError, match=message):
        writer.append(record(0, **changes))


def test_a_timed_flush_happens_only_when_something_has_waited_long_enough(tmp_path: Path):
    with open_writer(tmp_path, flush_every_s=2.0) as writer:
        assert not writer.maybe_flush(100.0)
        writer.append(record(0))
        assert not writer.maybe_flush(200.0)
        assert not writer.maybe_flush(201.9)
        assert writer.maybe_flush(202.0)
        assert not writer.maybe_flush(300.0)
        writer.set_status(0, "stale")
        assert not writer.maybe_flush(300.0)
        assert writer.maybe_flush(302.0)


def test_a_second_writer_of_the_same_rank_takes_the_next_file(tmp_path: Path):
    with open_writer(tmp_path) as first, open_writer(tmp_path, attempt=1) as second:
        assert (first.path.name, second.path.name) == ("env-3-0.h5", "env-3-1.h5")
        first.append(record(0))
        second.append(record(1))
    assert [shard.attributes["attempt"] for shard in open_run(tmp_path)] == [0, 1]


def test_codes_are_unified_when_shards_number_tasks_and_pools_differently(tmp_path: Path):
    with open_writer(tmp_path, rank=1) as writer:
        writer.append(record(0, task=0, pool=0))
    with open_writer(tmp_path, rank=2, tasks=["chain-sum", "frozen-lake"], pools=["bandwidth"]) as writer:
        writer.append(record(1, task=1, pool=0))
        writer.append(record(2, task=0, pool=-1))
    data = open_run(tmp_path)
    tasks = [data.tasks[row["task"]] for row in data.trajectories()]
    pools = [data.pools[row["pool"]] if row["pool"] >= 0 else None for row in data.trajectories()]
    assert tasks == ["frozen-lake", "frozen-lake", "chain-sum"]
    assert pools == ["compute", "bandwidth", None]


def test_a_file_that_is_no_shard_is_named_and_the_rest_is_read(tmp_path: Path):
    with open_writer(tmp_path) as writer:
        writer.append(record(0))
    (tmp_path / "trajectories" / "env-4-0.h5").write_bytes(b"")
    data = open_run(tmp_path)
    assert len(data.trajectories()) == 1
    (problem,) = data.problems
    assert "env-4-0.h5" in problem


def test_a_directory_that_is_no_run_is_one_clear_error(tmp_path: Path):
    with pytest.raises(StoreError, match="no run directory"):
        open_run(tmp_path)
    with pytest.raises(StoreError, match="is not a directory"):
        open_run(tmp_path / "missing")


def test_an_overridden_lock_setting_that_fails_is_explained(tmp_path: Path, monkeypatch):
    from hpc_rollart.store.files import explain

    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    error = explain("read", tmp_path / "x.h5", OSError("unable to lock file, errno = 38"))
    assert "x.h5" in str(error) and "HDF5_USE_FILE_LOCKING=FALSE" in str(error)


def test_sync_puts_every_shard_on_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    monkeypatch.setattr("hpc_rollart.store.writer.sync", lambda path: synced.append(path.name))
    with open_writer(tmp_path, rotate_mb=0.01) as shard:
        for trajectory in range(3):
            shard.append(record(trajectory, tokens=4000))
            shard.flush()
        current = shard.path.name
        shard.sync()
        assert len(synced) == len(set(synced)) and current in synced
        assert {path.name for path in (tmp_path / "trajectories").glob("*.h5")} < set(synced)
        synced.clear()
        shard.sync()
        assert synced == [current, "trajectories"]
