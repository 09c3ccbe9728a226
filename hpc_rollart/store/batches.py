"""Logs which trajectories each optimiser step consumed, so that an auditor can join them to the shards."""

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from hpc_rollart.folders import sync
from hpc_rollart.store import files
from hpc_rollart.store.schema import BATCH_FORMAT, BATCH_VERSION, CONSUMED

CHUNK = 512


class BatchWriter:
    """The one writer of ``<directory>/<attempt>.h5``; each `append` is flushed before it returns.

    Raises
    ------
    StoreError
        The log exists already (another trainer of this attempt) or cannot be written.
    """

    def __init__(self, directory: Path, *, run_id: str, attempt: int) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{attempt}.h5"
        try:
            self._file: h5py.File | None = files.create(self.path)
        except FileExistsError as error:
            raise files.StoreError(
                f"{self.path} exists: attempt {attempt} of this run has a batch log"
            ) from error
        attributes = {
            "format": BATCH_FORMAT,
            "format_version": BATCH_VERSION,
            "run_id": run_id,
            "attempt": attempt,
        }
        for name, value in attributes.items():
            self._file.attrs[name] = value
        self._consumed = self._file.create_dataset(
            "consumed", (0,), CONSUMED, maxshape=(None,), chunks=(CHUNK,)
        )
        self._file.swmr_mode = True

    def append(
        self,
        step: int,
        version: int,
        trajectories: Sequence[int],
        groups: Sequence[int],
        staleness: Sequence[int],
        advantages: Sequence[float],
    ) -> None:
        """Log the batch of `step`, trained from weight `version`; one entry a trajectory in each sequence."""
        if self._file is None:
            raise files.StoreError(f"{self.path} is closed")
        if not len(trajectories) == len(groups) == len(staleness) == len(advantages):
            raise ValueError(f"step {step}: the columns of its batch differ in length")
        rows = np.zeros(len(trajectories), CONSUMED)
        rows["step"] = step
        rows["version"] = version
        rows["trajectory"] = trajectories
        rows["group"] = groups
        rows["staleness"] = staleness
        rows["advantage"] = advantages
        start = len(self._consumed)
        try:
            self._consumed.resize((start + len(rows),))
            self._consumed[start:] = rows
            self._consumed.flush()
        except OSError as error:
            raise files.explain("write", self.path, error) from error

    def sync(self) -> None:
        """Wait until every step appended so far is on disk."""
        sync(self.path)

    def close(self) -> None:
        """Close; calling it twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "BatchWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
