"""Reads a run with h5py alone, as an auditor with only the documented layout would."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def rows(run: Path) -> tuple[np.ndarray, dict[str, list[str]]]:
    """All rows of all shards, and the names behind the codes."""
    parts, codes = [], {}
    for path in sorted((run / "trajectories").glob("*.h5")):
        with h5py.File(path, "r", swmr=True) as file:
            parts.append(file["trajectories"][:])
            codes = {name: [text.decode() for text in values[:]] for name, values in file["codes"].items()}
    return np.concatenate(parts), codes


def consumed(run: Path) -> np.ndarray:
    """What the trainer consumed."""
    with h5py.File(run / "batches" / "0.h5", "r", swmr=True) as file:
        return file["consumed"][:]


def first_versions(run: Path) -> dict[int, int]:
    """The version of each trajectory's first sampled token, from the tokens themselves."""
    import hdf5plugin  # noqa: F401  the tokens are compressed with its filter

    out: dict[int, int] = {}
    for path in sorted((run / "trajectories").glob("*.h5")):
        with h5py.File(path, "r", swmr=True) as file:
            versions, sampled = file["tokens/version"][:], file["tokens/sampled"][:]
            for row in file["trajectories"][:]:
                span = slice(row["token_offset"], row["token_offset"] + row["token_count"])
                mine = versions[span][sampled[span] == 1]
                out[int(row["trajectory"])] = int(mine[0]) if len(mine) else -1
    return out


def rewards_by_step(run: Path) -> dict[int, float]:
    """Mean reward of the trajectories that each step consumed."""
    reward = {int(row["trajectory"]): float(row["reward"]) for row in rows(run)[0]}
    log = consumed(run)
    return {
        int(step): float(np.mean([reward[int(t)] for t in log["trajectory"][log["step"] == step]]))
        for step in np.unique(log["step"])
    }


def status_counts(run: Path) -> dict[str, int]:
    """Number of rows with each status."""
    table, codes = rows(run)
    return {name: int(np.sum(table["status"] == code)) for code, name in enumerate(codes["status"])}


def tokens_of(run: Path) -> dict[int, dict[str, Any]]:
    """Token arrays of every trajectory."""
    import hdf5plugin  # noqa: F401

    out: dict[int, dict[str, Any]] = {}
    for path in sorted((run / "trajectories").glob("*.h5")):
        with h5py.File(path, "r", swmr=True) as file:
            columns = {name: file[f"tokens/{name}"][:] for name in ("id", "logprob", "version", "sampled")}
            for row in file["trajectories"][:]:
                span = slice(row["token_offset"], row["token_offset"] + row["token_count"])
                out[int(row["trajectory"])] = {name: values[span] for name, values in columns.items()}
    return out


def texts(run: Path) -> dict[int, dict[str, Any]]:
    """Messages and info of every trajectory."""
    import hdf5plugin  # noqa: F401

    out: dict[int, dict[str, Any]] = {}
    for path in sorted((run / "trajectories").glob("*.h5")):
        with h5py.File(path, "r", swmr=True) as file:
            text = file["text"][:]
            for row in file["trajectories"][:]:
                span = slice(row["text_offset"], row["text_offset"] + row["text_count"])
                out[int(row["trajectory"])] = json.loads(text[span].tobytes())
    return out
