"""The layout on disk is the published one, field by field."""

from pathlib import Path

import h5py
import pytest

from tests.store.records import POOLS, TASKS, open_writer, record

FLAT = {
    "tokens/id": "<i4",
    "tokens/logprob": "<f4",
    "tokens/version": "<i4",
    "tokens/sampled": "|u1",
    "text": "|u1",
}
ROWS = {
    "trajectories": {
        "trajectory": "<u8",
        "group": "<u8",
        "task": "|u1",
        "status": "|u1",
        "stop": "|u1",
        "seed": "<u8",
        "start_version": "<i4",
        "end_version": "<i4",
        "reward": "<f8",
        "turns": "<i4",
        "token_offset": "<u8",
        "token_count": "<u8",
        "turn_offset": "<u8",
        "text_offset": "<u8",
        "text_count": "<u8",
        "pool": "<i2",
        "generator": "<i2",
        "t_admitted": "<f8",
        "t_started": "<f8",
        "t_finished": "<f8",
        "t_scored": "<f8",
    },
    "turns": {
        "trajectory": "<u8",
        "turn": "<i4",
        "context_count": "<i4",
        "sampled_count": "<i4",
        "reward": "<f8",
        "t_generate": "<f8",
        "t_step": "<f8",
    },
}
ATTRIBUTES = {
    "format": "rollart-trajectories",
    "format_version": 1,
    "run_id": "test-run",
    "component": "env",
    "rank": 3,
    "host": "node-1",
    "attempt": 0,
}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory):
    run = tmp_path_factory.mktemp("run")
    with open_writer(run) as writer:
        writer.append(record(1))
    with h5py.File(writer.path, "r") as file:
        yield file


@pytest.mark.parametrize(("name", "dtype"), FLAT.items())
def test_a_flat_dataset_has_the_published_dtype_and_can_grow(shard, name, dtype):
    assert shard[name].dtype.str == dtype
    assert shard[name].maxshape == (None,)


@pytest.mark.parametrize("name", ROWS)
def test_a_compound_dataset_has_the_published_fields_in_order(shard, name):
    dtype = shard[name].dtype
    assert {field: dtype[field].str for field in dtype.names} == ROWS[name]
    assert list(dtype.names) == list(ROWS[name])


def test_the_attributes_say_who_wrote_it(shard):
    attributes = dict(shard.attrs)
    assert attributes.pop("created") > 1.6e9
    assert attributes == ATTRIBUTES


def test_the_code_tables_name_every_code(shard):
    codes = {name: [value.decode() for value in table[:]] for name, table in shard["codes"].items()}
    assert codes["task"] == TASKS
    assert codes["pool"] == POOLS
    assert codes["status"] == ["ok", "stale", "surplus", "env_failed", "reward_failed", "lost"]
    assert {"terminated", "truncated", "max_turns", "max_context", "cancelled"} <= set(codes["stop"])


def test_there_is_nothing_else_in_a_shard(shard):
    found = []
    shard.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    codes = {f"codes/{name}" for name in ("task", "status", "stop", "pool")}
    assert set(found) == set(FLAT) | set(ROWS) | codes


def test_a_shard_is_readable_by_its_owner_only(tmp_path: Path):
    with open_writer(tmp_path) as writer:
        assert writer.path.stat().st_mode & 0o777 == 0o600
