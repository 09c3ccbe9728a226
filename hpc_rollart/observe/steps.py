"""Reading metrics.jsonl: one line a step, checked once for all who show it."""

from pathlib import Path
from typing import Any

import msgspec

from hpc_rollart.errors import UserError

METRICS_FILE = "metrics.jsonl"


class _Step(msgspec.Struct):
    """What readers rely on; whatever else a line holds stays as it is. A number that is none is null."""

    step: int
    reward: dict[str, float | None] = {}
    reward_mean: float | None = None
    tokens_per_s: float | None = None
    staleness_mean: float | None = None
    wait_batch_s: float | None = None
    train_s: float | None = None
    publish_s: float | None = None


def read_step(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return line `number` of the metrics in `path`; raises `UserError` if it is damaged."""
    try:
        values: dict[str, Any] = msgspec.json.decode(line)
        msgspec.convert(values, _Step)
    except (ValueError, RecursionError) as error:
        text = f"{path}:{number}: not the line of a step ({error}); remove it to read on"
        raise UserError(text) from None
    return values


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of ``metrics.jsonl``, in order; none when the file is missing.

    A last line that a killed writer left torn is passed over.

    Raises
    ------
    UserError
        Another line is damaged.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [read_step(path, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]
