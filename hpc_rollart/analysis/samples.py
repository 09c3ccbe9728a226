"""Picks the trajectories worth reading: worst, median and best of each task, early and late, and failures."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_rollart.analysis.rundir import RunDir
from hpc_rollart.store.reader import RunData

MOST_CHARACTERS = 4000
MOST_FAILURES = 3


@dataclass(frozen=True)
class Bubble:
    """One message; `turn` and the numbers belong to sampled ones only.

    Attributes
    ----------
    text, cut
        What was said, and how many characters of it are left out here.
    versions
        Weight versions that sampled it, first and last.
    """

    role: str
    text: str
    cut: int
    sampled: bool
    turn: int = -1
    reward: float = 0.0
    tokens: int = 0
    logprob: float = 0.0
    versions: tuple[int, int] = (-1, -1)
    generate_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One trajectory to show, and why it was picked."""

    label: str
    task: str
    trajectory: int
    group: int
    status: str
    stop: str
    reward: float
    advantage: float | None
    step: int | None
    start_version: int
    end_version: int
    tokens: int
    seconds: float
    reason: str
    bubbles: list[Bubble]


def pick_samples(run: RunDir) -> list[Sample]:
    """Choose and read the samples of `run`, in order of task."""
    if run.data is None:
        return []
    data = run.data
    consumed, found, rows = data.consumed_rows()
    entries = {int(entry["trajectory"]): entry for entry in consumed}
    everything = data.trajectories()
    samples = []
    for task in range(len(data.tasks)):
        mine = found & (rows["task"] == task) & np.isfinite(rows["reward"])
        for trajectory, label in _extremes(rows[mine], consumed["step"][mine]):
            samples.append(_read(data, trajectory, label, entries))
        failed = everything[
            (everything["task"] == task) & (everything["status"] != data.statuses.index("ok"))
        ]
        # One of a kind is enough to see what went wrong.
        _, firsts = np.unique(failed[["status", "stop"]], return_index=True)
        for row in failed[sorted(firsts)[:MOST_FAILURES]]:
            label = data.statuses[row["status"]].replace("_", " ")
            samples.append(_read(data, int(row["trajectory"]), label, entries))
    return samples


def _extremes(rows: NDArray[Any], steps: NDArray[Any]) -> list[tuple[int, str]]:
    """Worst, median and best of the first and of the last tenth of the steps; each trajectory once."""
    if not len(rows):
        return []
    own = np.unique(steps)
    tenth = max(1, len(own) // 10)
    eras = [("early", own[:tenth]), ("late", own[-tenth:])] if len(own) > 1 else [("", own)]
    picked: dict[int, str] = {}
    for era, part in eras:
        inside = rows[np.isin(steps, part)]
        ranked = inside[np.argsort(inside["reward"], kind="stable")]
        for name, at in (("worst", 0), ("median", len(ranked) // 2), ("best", len(ranked) - 1)):
            picked.setdefault(int(ranked["trajectory"][at]), f"{era} {name}".strip())
    return list(picked.items())


def _read(data: RunData, trajectory: int, label: str, entries: dict[int, Any]) -> Sample:
    rows = data.trajectories()
    row = rows[rows["trajectory"] == trajectory][-1]
    text = data.text_of(trajectory)
    entry = entries.get(trajectory)
    return Sample(
        label=label,
        task=data.tasks[row["task"]],
        trajectory=trajectory,
        group=int(row["group"]),
        status=data.statuses[row["status"]],
        stop=data.stops[row["stop"]],
        reward=float(row["reward"]),
        advantage=None if entry is None else float(entry["advantage"]),
        step=None if entry is None else int(entry["step"]),
        start_version=int(row["start_version"]),
        end_version=int(row["end_version"]),
        tokens=int(row["token_count"]),
        seconds=float(row["t_finished"] - row["t_started"]),
        reason=str(text["info"].get("reason") or text["info"].get("error") or ""),
        bubbles=_bubbles(data, trajectory, text["messages"]),
    )


def _bubbles(data: RunData, trajectory: int, messages: list[dict[str, Any]]) -> list[Bubble]:
    """Messages with the numbers of their turns: the n-th assistant message is what turn n sampled."""
    turns, tokens = data.turns_of(trajectory), data.tokens_of(trajectory)
    bubbles, turn, at = [], 0, 0
    for message in messages:
        role, content = str(message.get("role", "?")), str(message.get("content", ""))
        text, cut = content[:MOST_CHARACTERS], max(0, len(content) - MOST_CHARACTERS)
        if role != "assistant" or turn >= len(turns):
            if not content:
                continue  # an environment that has nothing to say at the end of an episode
            bubbles.append(Bubble(role, text, cut, sampled=False))
            continue
        own = turns[turn]
        start = at + int(own["context_count"])
        at = start + int(own["sampled_count"])
        versions = tokens.version[start:at]
        bubbles.append(
            Bubble(
                role,
                text,
                cut,
                sampled=True,
                turn=turn,
                reward=float(own["reward"]),
                tokens=at - start,
                logprob=float(tokens.logprob[start:at].mean()) if at > start else 0.0,
                versions=(int(versions.min()), int(versions.max())) if at > start else (-1, -1),
                generate_s=float(own["t_generate"]),
                step_s=float(own["t_step"]),
            )
        )
        turn += 1
    return bubbles
