"""Writes what one rank saw to HDF5 shards, such that everything flushed outlives the writer."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpc_rollart.folders import sync
from hpc_rollart.store import files
from hpc_rollart.store.schema import (
    NO_POOL,
    SHARD_FORMAT,
    SHARD_VERSION,
    STATUSES,
    STOPS,
    TOKEN_COLUMNS,
    TRAJECTORY,
    TURN,
)
from hpc_rollart.store.text import encode_text

# Rows are never compressed: the status is rewritten in place, and h5py alone must read them.
ROW_CHUNK = 256
# Each flush rewrites the last, partial chunk, and SWMR cannot reuse the space of a compressed one: small
# chunks keep that waste small, and cost neither speed nor compression.
TOKEN_CHUNK = 4096
TEXT_CHUNK = 16384
# Bounds what an episode flood can hold in memory between two timed flushes (13 bytes a token).
MAX_BUFFERED_TOKENS = 1 << 20

_NAN = float("nan")
_STATUS_CODE = {name: code for code, name in enumerate(STATUSES)}
_STOP_CODE = {name: code for code, name in enumerate(STOPS)}
_STATUS_BYTE = TRAJECTORY.fields["status"][1]  # type: ignore[index]
# Row fields that the record holds as they are; the rest are codes, counts and offsets.
_COPIED = (
    "trajectory",
    "group",
    "task",
    "seed",
    "start_version",
    "end_version",
    "reward",
    "pool",
    "generator",
    "t_admitted",
    "t_started",
    "t_finished",
    "t_scored",
)


@dataclass(slots=True)
class TurnRecord:
    """One turn: tokens added before sampling, tokens sampled, its reward, seconds spent in each half."""

    context_count: int
    sampled_count: int
    reward: float = 0.0
    t_generate: float = 0.0
    t_step: float = 0.0


@dataclass(slots=True)
class TrajectoryRecord:
    """Everything a shard keeps of one trajectory.

    Attributes
    ----------
    trajectory, group
        Identity, unsigned 64-bit.
    task, pool
        Indices into the writer's `tasks` and `pools`; pool −1 where no replica served it.
    status, stop
        Names from `schema.STATUSES` and `schema.STOPS`.
    start_version, end_version
        Weight versions that sampled the first and the last token; −1 where none was sampled.
    reward
        NaN where it was never scored.
    t_admitted, t_started, t_finished, t_scored
        Unix seconds; NaN where it never got there.
    tokens, logprobs, versions, sampled
        int32, float32, int32, uint8, each of shape (T,); NaN and −1 where a token was not sampled.
    turns
        In order.
    messages, info
        JSON-able: the conversation as ``{"role", "content"}`` objects and whatever helps to explain it
        (the failure's reason, the environment's facts).
    """

    trajectory: int
    group: int
    task: int
    status: str
    stop: str
    seed: int = 0
    start_version: int = -1
    end_version: int = -1
    reward: float = _NAN
    pool: int = NO_POOL
    generator: int = -1
    t_admitted: float = _NAN
    t_started: float = _NAN
    t_finished: float = _NAN
    t_scored: float = _NAN
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    sampled: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    turns: Sequence[TurnRecord] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


class ShardWriter:
    """The one writer of ``<directory>/<component>-<rank>-<seq>.h5``, rotated by size.

    Not safe for several threads. Nothing is on disk before `flush`, which `append` calls by itself only
    when a great many tokens wait; call `maybe_flush` in the rank's loop.

    Parameters
    ----------
    directory
        ``RUN/trajectories``; made if missing.
    component, rank, run_id, host, attempt
        Kept as attributes of every shard.
    tasks, pools
        The names behind the task and pool codes, in code order (at most 256 tasks).
    filter
        ``bitshuffle-lz4``, ``gzip`` or ``none``; applied to tokens and text only.
    rotate_mb
        A shard larger than this many MiB is closed at the next flush and another one begun.
    flush_every_s
        Longest time that `maybe_flush` leaves a change unflushed.

    Raises
    ------
    StoreError
        The directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        component: str,
        rank: int,
        run_id: str,
        host: str,
        attempt: int,
        tasks: Sequence[str],
        pools: Sequence[str],
        filter: str = "bitshuffle-lz4",
        rotate_mb: float = 1024.0,
        flush_every_s: float = 5.0,
    ) -> None:
        if filter not in files.FILTERS:
            raise ValueError(f"store.filter is {filter!r}; known: {', '.join(files.FILTERS)}")
        if len(tasks) > 256:
            raise ValueError(f"a shard has codes for 256 tasks, the run has {len(tasks)}")
        self._directory = Path(directory)
        self._stem = f"{component}-{rank}"
        self._attributes = {
            "format": SHARD_FORMAT,
            "format_version": SHARD_VERSION,
            "run_id": run_id,
            "component": component,
            "rank": rank,
            "host": host,
            "attempt": attempt,
        }
        self._codes = {"task": list(tasks), "status": STATUSES, "stop": STOPS, "pool": list(pools)}
        self._filter = filter
        self._rotate_bytes = int(rotate_mb * (1 << 20))
        self._flush_every_s = flush_every_s
        self._due: float | None = None
        self._dirty = False
        self._buffer: list[TrajectoryRecord] = []
        self._buffered_tokens = 0
        # trajectory -> (shard sequence number, row): where `set_status` finds it again.
        self._where: dict[int, tuple[int, int]] = {}
        # Of every rotated shard, its path and the file offset of each chunk of /trajectories.
        self._rotated: dict[int, tuple[Path, list[int]]] = {}
        self._unsynced: list[Path] = []  # rotated shards that may be in the page cache only
        self._seq = -1
        self._file: h5py.File | None = None
        self._open_next()

    @property
    def path(self) -> Path:
        """The shard being written now."""
        return self._path

    def append(self, record: TrajectoryRecord) -> None:
        """Buffer one trajectory's row; it is on disk after the next flush.

        Raises
        ------
        ValueError
            The record contradicts itself (array lengths, unknown names, a second row for one trajectory).
        """
        self._check(record)
        self._where[record.trajectory] = (self._seq, self._rows + len(self._buffer))
        self._buffer.append(record)
        self._buffered_tokens += len(record.tokens)
        if self._buffered_tokens >= MAX_BUFFERED_TOKENS:
            self.flush()

    def set_status(self, trajectory: int, status: str) -> None:
        """Rewrite the status of a row that was appended before (buffered, on disk or in a rotated shard).

        Raises
        ------
        KeyError
            This writer never saw the trajectory.
        """
        code = _STATUS_CODE[status]
        seq, row = self._where[trajectory]
        if seq != self._seq:
            # HDF5 would have to reopen the shard for writing, and a kill in that moment would cost the
            # whole file. One byte of an uncompressed chunk is replaced atomically instead.
            path, offsets = self._rotated[seq]
            at = offsets[row // ROW_CHUNK] + row % ROW_CHUNK * TRAJECTORY.itemsize + _STATUS_BYTE
            with open(path, "r+b", buffering=0) as raw:
                os.pwrite(raw.fileno(), bytes([code]), at)
        elif row >= self._rows:
            self._buffer[row - self._rows].status = status
        else:
            self._open_file()["trajectories"][row, "status"] = code
            self._dirty = True

    def maybe_flush(self, now: float) -> bool:
        """Flush what has waited `flush_every_s` since a call first saw it; `now` is of any steady clock."""
        if not self._buffer and not self._dirty:
            return False
        if self._due is None:
            self._due = now + self._flush_every_s
        if now < self._due:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write and flush everything appended so far; afterwards ``kill -9`` costs none of it.

        Raises
        ------
        StoreError
            HDF5 could not write (disk full, over quota); the message names the shard.
        """
        self._due = None
        file = self._open_file()
        try:
            if self._buffer:
                self._write(file)
            elif self._dirty:
                file["trajectories"].flush()
            self._dirty = False
            if file.id.get_filesize() >= self._rotate_bytes and self._rows:
                self._rotate(file)
        except OSError as error:
            raise files.explain("write", self._path, error) from error

    def sync(self) -> None:
        """Flush, and wait until everything is on disk: a node that goes down costs none of it either."""
        self.flush()
        for path in (*self._unsynced, self._path, self._directory):
            sync(path)
        self._unsynced.clear()

    def close(self) -> None:
        """Flush and close; calling it twice is fine."""
        if self._file is None:
            return
        self.flush()
        self._open_file().close()
        self._file = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check(self, record: TrajectoryRecord) -> None:
        count = len(record.tokens)
        if not len(record.logprobs) == len(record.versions) == len(record.sampled) == count:
            raise ValueError(
                f"trajectory {record.trajectory}: {count} tokens, but {len(record.logprobs)} logprobs, "
                f"{len(record.versions)} versions, {len(record.sampled)} sampled flags"
            )
        if record.status not in _STATUS_CODE or record.stop not in _STOP_CODE:
            raise ValueError(
                f"trajectory {record.trajectory}: the schema has no status {record.status!r} or no stop "
                f"{record.stop!r}"
            )
        if not 0 <= record.task < len(self._codes["task"]):
            raise ValueError(f"trajectory {record.trajectory}: task {record.task} has no name")
        if record.trajectory in self._where:
            raise ValueError(f"trajectory {record.trajectory} already has its row")

    def _open_file(self) -> h5py.File:
        if self._file is None:
            raise files.StoreError(f"{self._path} is closed")
        return self._file

    def _open_next(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            # An earlier attempt of the same rank leaves its shards here; take the next free number.
            self._seq += 1
            self._path = self._directory / f"{self._stem}-{self._seq}.h5"
            try:
                file = files.create(self._path)
            except FileExistsError:
                continue
            except OSError as error:
                raise files.explain("create", self._path, error) from error
            break
        for name, value in self._attributes.items():
            file.attrs[name] = value
        file.attrs["created"] = time.time()
        packed = files.FILTERS[self._filter]
        for name, dtype in TOKEN_COLUMNS.items():
            _growing(file, f"tokens/{name}", dtype, TOKEN_CHUNK, packed)
        _growing(file, "turns", TURN, ROW_CHUNK, {})
        _growing(file, "text", np.dtype("u1"), TEXT_CHUNK, packed)
        _growing(file, "trajectories", TRAJECTORY, ROW_CHUNK, {})
        for name, values in self._codes.items():
            encoded = [value.encode() for value in values]
            width = max((len(value) for value in encoded), default=1)
            file.create_dataset(
                f"codes/{name}", data=encoded, dtype=h5py.string_dtype("utf-8", max(width, 1))
            )
        file.swmr_mode = True
        self._file = file
        self._rows = self._turns = self._tokens = self._text = 0

    def _rotate(self, file: h5py.File) -> None:
        rows = file["trajectories"].id
        offsets = [rows.get_chunk_info_by_coord((at,)).byte_offset for at in range(0, self._rows, ROW_CHUNK)]
        self._rotated[self._seq] = (self._path, offsets)
        self._unsynced.append(self._path)
        file.close()
        self._file = None
        self._open_next()

    def _write(self, file: h5py.File) -> None:
        """One block for the whole buffer: what rows point to is flushed before the rows that point to it."""
        records, self._buffer = self._buffer, []
        self._buffered_tokens = 0
        texts = [encode_text(record.messages, record.info) for record in records]
        rows = np.zeros(len(records), TRAJECTORY)
        rows["token_count"] = [len(record.tokens) for record in records]
        rows["token_offset"] = _offsets(self._tokens, rows["token_count"])
        rows["text_count"] = [len(text) for text in texts]
        rows["text_offset"] = _offsets(self._text, rows["text_count"])
        rows["turns"] = [len(record.turns) for record in records]
        rows["turn_offset"] = _offsets(self._turns, rows["turns"])
        rows["status"] = [_STATUS_CODE[record.status] for record in records]
        rows["stop"] = [_STOP_CODE[record.stop] for record in records]
        for name in _COPIED:
            rows[name] = [getattr(record, name) for record in records]
        turns = np.array(
            [
                (r.trajectory, i, t.context_count, t.sampled_count, t.reward, t.t_generate, t.t_step)
                for r in records
                for i, t in enumerate(r.turns)
            ],
            TURN,
        )
        _extend(file["tokens/id"], self._tokens, np.concatenate([r.tokens for r in records]))
        _extend(file["tokens/logprob"], self._tokens, np.concatenate([r.logprobs for r in records]))
        _extend(file["tokens/version"], self._tokens, np.concatenate([r.versions for r in records]))
        _extend(file["tokens/sampled"], self._tokens, np.concatenate([r.sampled for r in records]))
        _extend(file["turns"], self._turns, turns)
        _extend(file["text"], self._text, np.frombuffer(b"".join(texts), np.uint8))
        _extend(file["trajectories"], self._rows, rows)
        self._rows += len(rows)
        self._turns += len(turns)
        self._tokens += int(rows["token_count"].sum())
        self._text += int(rows["text_count"].sum())


def _offsets(start: int, counts: NDArray[Any]) -> NDArray[np.uint64]:
    ends = np.cumsum(counts, dtype=np.uint64)
    return (np.uint64(start) + ends - counts.astype(np.uint64)).astype(np.uint64)


def _growing(file: h5py.File, name: str, dtype: np.dtype, chunk: int, packed: Mapping[str, Any]) -> None:
    file.create_dataset(name, shape=(0,), maxshape=(None,), chunks=(chunk,), dtype=dtype, **packed)


def _extend(dataset: h5py.Dataset, at: int, values: NDArray[Any]) -> None:
    if len(values):
        dataset.resize((at + len(values),))
        dataset[at:] = values
    dataset.flush()
