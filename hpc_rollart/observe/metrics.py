"""Writes the run's numbers, one line a step, for people with `tail`, `jq` or TensorBoard."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tensorboard.summary import Writer

from hpc_rollart.folders import sync
from hpc_rollart.observe.steps import METRICS_FILE


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"metrics cannot hold {type(value).__name__}")


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested mappings, named by their path: ``reward/frozen-lake``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float | np.number) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


class MetricsWriter:
    """Appends to ``RUN/metrics.jsonl`` and writes scalars under ``RUN/tensorboard``.

    A NaN or an infinity, for which JSON has no word, becomes null (and no TensorBoard point).

    Parameters
    ----------
    run_dir
        The run's directory.
    step
        The first step that will be written. What an earlier attempt of the run wrote of this one and later
        ones is cut off.
    """

    def __init__(self, run_dir: Path, step: int = 0) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path, directory = run_dir / METRICS_FILE, run_dir / "tensorboard"
        old = list(directory.glob("events.*"))
        self._tensorboard = Writer(str(directory))
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith(b"\n") and _step(line) < step]
        if len(kept) < len(lines):
            # Points cannot be taken back from an event file, so what is left is written anew. This comes
            # before the lines are cut: if it is broken off, the next attempt does it again.
            for line in kept:
                self._points(json.loads(line))
            self._tensorboard.flush()
            for events in old:
                events.unlink()
            _replace(path, b"".join(kept))
        # Unbuffered: a line is on its way to disk, whole, before the step counts as reported.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, line: Mapping[str, Any]) -> None:
        """Write the line of one step; `line` has an int ``step`` and JSON-able values, dicts nested."""
        self._file.write(msgspec.json.encode(line, enc_hook=_plain) + b"\n")
        self._points(line)
        self._tensorboard.flush()

    def _points(self, line: Mapping[str, Any]) -> None:
        for tag, value in _scalars(line):
            if tag != "step":
                self._tensorboard.add_scalar(tag, value, int(line["step"]), wall_time=line.get("t"))

    def sync(self) -> None:
        """Wait until every line written so far is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close both files; calling it twice is fine."""
        if not self._file.closed:
            self._file.close()
            self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _replace(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_bytes(content)
    sync(aside)
    aside.replace(path)
    sync(path.parent)


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # damaged: better a step without a line than a file that nobody can read
