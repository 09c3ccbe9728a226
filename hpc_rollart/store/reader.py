"""Reads a run's shards and batch logs, live or finished, as NumPy structured arrays."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpc_rollart.store import files
from hpc_rollart.store.files import StoreError
from hpc_rollart.store.schema import (
    BATCH_FORMAT,
    BATCH_VERSION,
    CONSUMED,
    SHARD_FORMAT,
    SHARD_VERSION,
    STATUSES,
    STOPS,
    TRAJECTORY,
    TURN,
)
from hpc_rollart.store.text import decode_text


@dataclass(frozen=True, slots=True)
class Tokens:
    """Columns of `/tokens`: int32, float32, int32 and uint8 arrays of one shape (T,)."""

    id: NDArray[np.int32]
    logprob: NDArray[np.float32]
    version: NDArray[np.int32]
    sampled: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard as far as it was flushed when it was read; tokens and text are read from `path` on demand.

    `rows` keep the file's own codes (see `codes`) and offsets; `RunData.trajectories` has them unified.
    """

    path: Path
    attributes: dict[str, Any]
    codes: dict[str, list[str]]
    rows: NDArray[Any]

    def tokens(self) -> Tokens:
        """All tokens that the rows point to, in order (the offsets of `rows` index them)."""
        return self._slice_tokens(0, int(self.rows["token_count"].sum()))

    def tokens_of(self, row: int) -> Tokens:
        """Tokens of one row."""
        start = int(self.rows["token_offset"][row])
        return self._slice_tokens(start, start + int(self.rows["token_count"][row]))

    def turns(self) -> NDArray[Any]:
        """All turns that the rows point to, in order, of dtype `schema.TURN`."""
        return self._read("turns", 0, int(self.rows["turns"].sum())).astype(TURN, copy=False)

    def turns_of(self, row: int) -> NDArray[Any]:
        """Turns of one row, of dtype `schema.TURN`."""
        start = int(self.rows["turn_offset"][row])
        turns = self._read("turns", start, start + int(self.rows["turns"][row]))
        return turns.astype(TURN, copy=False)

    def text_of(self, row: int) -> dict[str, Any]:
        """``{"messages": [...], "info": {...}}`` of one row."""
        start = int(self.rows["text_offset"][row])
        return decode_text(self._read("text", start, start + int(self.rows["text_count"][row])).tobytes())

    def _slice_tokens(self, start: int, stop: int) -> Tokens:
        return Tokens(*(self._read(f"tokens/{name}", start, stop) for name in Tokens.__slots__))

    def _read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        with files.open_for_reading(self.path) as file:
            try:
                values: NDArray[Any] = file[name][start:stop]
            except (OSError, KeyError) as error:
                raise files.explain(f"read /{name} of", self.path, error) from error
        if len(values) != stop - start:
            raise StoreError(
                f"{self.path}: /{name} ends at {start + len(values)}, its rows point up to {stop}"
            )
        return values


def read_shard(path: Path) -> Shard:
    """Read the rows of one shard.

    Raises
    ------
    StoreError
        The file cannot be opened, or is not a shard of a version known here.
    """
    with files.open_for_reading(path) as file:
        attributes = _attributes(file, path, SHARD_FORMAT, SHARD_VERSION)
        try:
            codes = {
                name: [value.decode() for value in file[f"codes/{name}"][:]]
                for name in ("task", "status", "stop", "pool")
            }
            rows = file["trajectories"][:].astype(TRAJECTORY, copy=False)
        except (OSError, KeyError) as error:
            raise files.explain("read", path, error) from error
    return Shard(path, attributes, codes, rows)


def read_consumed(path: Path) -> NDArray[Any]:
    """Read one batch log, of dtype `schema.CONSUMED`.

    Raises
    ------
    StoreError
        The file cannot be opened, or is not a batch log of a version known here.
    """
    with files.open_for_reading(path) as file:
        _attributes(file, path, BATCH_FORMAT, BATCH_VERSION)
        rows: NDArray[Any] = file["consumed"][:]
    return rows


def _attributes(file: h5py.File, path: Path, format: str, version: int) -> dict[str, Any]:
    attributes = dict(file.attrs)
    if attributes.get("format") != format:
        raise StoreError(f"{path} is not in format {format!r} (it says {attributes.get('format')!r})")
    if attributes["format_version"] != version:
        raise StoreError(
            f"{path} has {format} version {attributes['format_version']}; this program reads {version}"
        )
    return attributes


class RunData:
    """All shards and batch logs of one run, as far as they were flushed when opened.

    Attributes
    ----------
    path
        The run directory.
    shards
        In order of file name.
    tasks, statuses, stops, pools
        Names behind the codes of `trajectories`.
    problems
        One line for each file that could not be read (a writer killed while creating it leaves one); its
        rows are absent from everything here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.shards: list[Shard] = []
        self.tasks: list[str] = []
        self.statuses: list[str] = list(STATUSES)
        self.stops: list[str] = list(STOPS)
        self.pools: list[str] = []
        for file in sorted((path / "trajectories").glob("*.h5")):
            try:
                self.shards.append(read_shard(file))
            except StoreError as error:
                self.problems.append(str(error))
        # Rows of all shards in one array, and beside it which shard and row each came from.
        self._rows: NDArray[Any] = np.concatenate([np.empty(0, TRAJECTORY), *map(self._unified, self.shards)])
        counts = [len(shard.rows) for shard in self.shards]
        self._shard_of = np.repeat(np.arange(len(counts)), counts)
        self._row_of = np.concatenate([np.empty(0, np.int64), *(np.arange(count) for count in counts)])
        self._index = {int(t): i for i, t in enumerate(self._rows["trajectory"])}
        self._consumed, self._consumed_by, self._rolled_back = self._read_batches()

    def trajectories(self) -> NDArray[Any]:
        """One row of dtype `schema.TRAJECTORY` a trajectory; its codes index this object's name lists."""
        return self._rows

    def consumed(self) -> NDArray[Any]:
        """What made the policy: rows of dtype `schema.CONSUMED` of all attempts, in order of step."""
        return self._consumed

    def consumed_by(self) -> NDArray[np.int64]:
        """The attempt whose batch log has it, for each row of `consumed`."""
        return self._consumed_by

    def rolled_back(self) -> NDArray[Any]:
        """Rows, as of `consumed`, of steps that were done after an attempt's last checkpoint and then lost.

        A later attempt did those steps anew, from older weights.
        """
        return self._rolled_back

    def tokens_of(self, trajectory: int) -> Tokens:
        """Tokens of one trajectory; KeyError when no shard has its row."""
        shard, row = self._find(trajectory)
        return shard.tokens_of(row)

    def turns_of(self, trajectory: int) -> NDArray[Any]:
        """Turns of one trajectory, of dtype `schema.TURN`; KeyError when no shard has its row."""
        shard, row = self._find(trajectory)
        return shard.turns_of(row)

    def text_of(self, trajectory: int) -> dict[str, Any]:
        """Messages and info of one trajectory; KeyError when no shard has its row."""
        shard, row = self._find(trajectory)
        return shard.text_of(row)

    def messages_of(self, trajectory: int) -> list[dict[str, Any]]:
        """The conversation of one trajectory, in order."""
        messages: list[dict[str, Any]] = self.text_of(trajectory)["messages"]
        return messages

    def consumed_rows(self) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any]]:
        """Join the batch logs to the shards.

        Returns
        -------
        consumed
            What `consumed` gives, shape (C,).
        found
            Whether a shard has the row, bool (C,).
        rows
            The matching `trajectories()` rows, shape (C,); zeros where not `found`.
        """
        at = np.array([self._index.get(int(t), -1) for t in self._consumed["trajectory"]], np.int64)
        rows = np.zeros(len(at), TRAJECTORY)
        rows[at >= 0] = self._rows[at[at >= 0]]
        return self._consumed, at >= 0, rows

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.shards)

    def _find(self, trajectory: int) -> tuple[Shard, int]:
        at = self._index[trajectory]
        return self.shards[self._shard_of[at]], int(self._row_of[at])

    def _unified(self, shard: Shard) -> NDArray[Any]:
        rows = shard.rows.copy()
        for name, known in (("task", self.tasks), ("status", self.statuses), ("stop", self.stops)):
            rows[name] = _translation(shard.codes[name], known)[rows[name]]
        served = rows["pool"] >= 0
        rows["pool"][served] = _translation(shard.codes["pool"], self.pools)[rows["pool"][served]]
        return rows

    def _first_step(self, attempt: int, rows: NDArray[Any]) -> int | None:
        """The step that an attempt began with: from the record of its start, or else from its own log."""
        try:
            record = json.loads((self.path / "logs" / str(attempt) / "attempt.json").read_text())
            return int(record["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return int(rows["step"].min()) if len(rows) else None

    def _read_batches(self) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]:
        """Rows that count, the attempt of each, and rows that a later attempt took back.

        An attempt begins at a checkpoint and does every step from there on, so the step that it began with
        says which steps of earlier attempts count no more.
        """
        kept = [(np.empty(0, CONSUMED), np.empty(0, np.int64))]
        taken_back = [np.empty(0, CONSUMED)]
        logs = {int(path.stem): path for path in (self.path / "batches").glob("*.h5") if path.stem.isdigit()}
        redone_from = np.iinfo(np.int64).max
        for attempt in sorted(logs, reverse=True):
            try:
                rows = read_consumed(logs[attempt])
            except StoreError as error:
                self.problems.append(str(error))
                continue
            counts = rows["step"] < redone_from
            kept.append((rows[counts], np.full(int(counts.sum()), attempt)))
            taken_back.append(rows[~counts])
            if (first := self._first_step(attempt, rows)) is not None:
                redone_from = min(redone_from, first)
        consumed, by = (np.concatenate(columns[::-1]) for columns in zip(*kept, strict=True))
        return consumed, by, np.concatenate(taken_back[::-1])


def open_run(path: Path | str) -> RunData:
    """Open a run directory, whether the run goes on, ended or was killed.

    Raises
    ------
    StoreError
        There is no such directory, or it is no run's.
    """
    path = Path(path)
    if not path.is_dir():
        raise StoreError(f"{path} is not a directory")
    if not (path / "trajectories").is_dir():
        raise StoreError(f"{path} is no run directory: no trajectories/ in it (did the run ever start?)")
    return RunData(path)


def _translation(names: Sequence[str], known: list[str]) -> NDArray[np.uint8]:
    """Codes of `names` in `known`; names it lacks are added (shards of another version of the program)."""
    for name in names:
        if name not in known:
            known.append(name)
    return np.array([known.index(name) for name in names], np.uint8)
