"""Audits a run: recounts from the shards and the batch logs what the run claims, and trusts nothing else.

Every check states an invariant of the design; a violation becomes one line that names the trajectory,
step or file. It reads a run that still goes on, too, and then does not miss what is still to come.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_rollart.analysis.rundir import CLEAN_ENDS, AttemptView, RunDir, open_run_dir
from hpc_rollart.store.files import StoreError
from hpc_rollart.store.reader import RunData, Shard
from hpc_rollart.store.schema import attempt_of, first_trajectory

# Metrics and shards both hold float64; a sum in another order is all that may differ.
RELATIVE_TOLERANCE = 1e-6
MOST_SHOWN = 10


@dataclass(frozen=True)
class Check:
    """One invariant: how many things were looked at, and what was wrong with which."""

    name: str
    checked: int
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Audit:
    """The outcome of all checks.

    Attributes
    ----------
    checks
        One an invariant, in the order printed.
    notes
        What the audit could not look at, and why.
    attempts
        One line each, for a run that was started more than once.
    """

    run: str
    checks: list[Check]
    notes: list[str] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Every violation, as ``check: what``; empty for a sound run."""
        return [f"{check.name}: {problem}" for check in self.checks for problem in check.problems]

    def table(self) -> str:
        """The outcome as text, the first violations of each check below it."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"audit of {self.run}", *(f"  {attempt}" for attempt in self.attempts)]
        for check in self.checks:
            verdict = "ok" if not check.problems else f"{len(check.problems)} WRONG"
            lines.append(f"  {check.name:<{width}}  {check.checked:>9,} checked  {verdict}")
            lines += [f"      {problem}" for problem in check.problems[:MOST_SHOWN]]
            if len(check.problems) > MOST_SHOWN:
                lines.append(f"      … and {len(check.problems) - MOST_SHOWN} more")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def audit(run_dir: Path) -> Audit:
    """Recount the run in `run_dir`.

    Raises
    ------
    StoreError
        There is nothing to audit: no such directory, or no shards in it.
    """
    run = open_run_dir(run_dir)
    if run.data is None:
        raise StoreError(run.problems[0])
    consumed, found, rows = run.data.consumed_rows()
    notes = list(run.problems)
    ended = run.attempts[-1].state in CLEAN_ENDS
    if not ended:
        notes.append(f"the run is {run.state}: trajectories without a row may have been in flight")
    checks = [
        _staleness(run, consumed, found, rows, ended),
        _consumed_once(consumed, run.data.consumed_by()),
        _complete_groups(run, consumed, found, rows),
        _consumed_are_ok(run.data, consumed, found, rows),
        _one_row(run, run.data),
        _every_step(run),
        _token_truth(run.data),
        _metrics(run, consumed, found, rows, ended),
    ]
    if not run.metrics:
        notes.append("no metrics.jsonl: rewards were not compared")
    return Audit(str(run.path), checks, notes, _attempts(run, run.data))


def _attempts(run: RunDir, data: RunData) -> list[str]:
    """What each attempt contributed, and what of it was lost with it."""
    if len(run.attempts) == 1:
        return []
    steps, by = data.consumed()["step"], data.consumed_by()
    back = data.rolled_back()
    owner = np.array([attempt_of(int(trajectory)) for trajectory in back["trajectory"]], np.int64)
    lines = []
    for attempt in run.attempts:
        own, lost = np.unique(steps[by == attempt.number]), back["step"][owner == attempt.number]
        done = f"steps {own[0]} to {own[-1]}" if len(own) else "no step that counts"
        line = f"attempt {attempt.number}: began at step {attempt.step}, {done}, {attempt.state}"
        if len(lost):
            line += f"; {len(lost)} trajectories of {len(np.unique(lost))} steps rolled back"
        lines.append(line)
    return lines


def _staleness(
    run: RunDir, consumed: NDArray[Any], found: NDArray[Any], rows: NDArray[Any], ended: bool
) -> Check:
    """Invariant 1: version − start_version ≤ alpha for everything consumed."""
    problems = []
    last = run.attempts[-1].number
    actual = consumed["version"].astype(np.int64) - rows["start_version"]
    for entry, known, start, lag in zip(consumed, found, rows["start_version"], actual, strict=True):
        where = f"step {entry['step']}, trajectory {entry['trajectory']}"
        if not known:
            # A killed or running env rank may not have flushed it yet; but before a checkpoint it has.
            if not ended and attempt_of(int(entry["trajectory"])) == last:
                continue
            problems.append(f"{where}: consumed, but no shard has its row")
        elif start < 0:
            problems.append(f"{where}: consumed, but no token of it was sampled")
        elif lag < 0 or (run.alpha is not None and lag > run.alpha):
            problems.append(
                f"{where}: started at version {start}, trained on from {entry['version']} (alpha {run.alpha})"
            )
        elif lag != entry["staleness"]:
            problems.append(f"{where}: staleness {lag}, logged as {entry['staleness']}")
    return Check("staleness within alpha", len(consumed), problems)


def _consumed_once(consumed: NDArray[Any], by: NDArray[np.int64]) -> Check:
    """Invariant 2, first half: over all attempts, and in the attempt that started it."""
    times = Counter(consumed["trajectory"].tolist())
    problems = []
    for trajectory, count in times.items():
        if count > 1:
            steps = consumed["step"][consumed["trajectory"] == trajectory].tolist()
            problems.append(f"trajectory {trajectory} was consumed {count} times, in steps {steps}")
    for trajectory, attempt in zip(consumed["trajectory"].tolist(), by.tolist(), strict=True):
        if attempt_of(trajectory) != attempt:
            own = attempt_of(trajectory)
            problems.append(f"trajectory {trajectory} of attempt {own} was consumed in attempt {attempt}")
    return Check("consumed at most once", len(times), problems)


def _complete_groups(run: RunDir, consumed: NDArray[Any], found: NDArray[Any], rows: NDArray[Any]) -> Check:
    """Invariant 2, second half: only whole groups, each in one step."""
    size = run.config.get("algorithm", {}).get("group_size")
    problems = []
    members = Counter(zip(consumed["group"].tolist(), consumed["step"].tolist(), strict=True))
    for (group, step), count in members.items():
        if size is not None and count != size:
            problems.append(f"step {step} consumed {count} of group {group}, not {size}")
    for group, count in Counter(group for group, _ in members).items():
        if count > 1:
            problems.append(f"group {group} was consumed in {count} steps")
    wrong = found & (consumed["group"] != rows["group"])
    for entry, row in zip(consumed[wrong], rows[wrong], strict=True):
        problems.append(
            f"trajectory {entry['trajectory']} is of group {row['group']}, logged in {entry['group']}"
        )
    return Check("complete groups", len({group for group, _ in members}), problems)


def _consumed_are_ok(data: RunData, consumed: NDArray[Any], found: NDArray[Any], rows: NDArray[Any]) -> Check:
    """Invariant 3: what failed, or was dropped, never enters a batch; nor a reward that is none."""
    problems = []
    for entry, row in zip(consumed[found], rows[found], strict=True):
        where = f"step {entry['step']}, trajectory {entry['trajectory']}"
        status = data.statuses[row["status"]]
        if status != "ok":
            problems.append(f"{where}: consumed, but its status is {status}")
        if not math.isfinite(row["reward"]):
            problems.append(f"{where}: consumed with reward {row['reward']}")
    return Check("a failure is not a reward", int(found.sum()), problems)


def _one_row(run: RunDir, data: RunData) -> Check:
    """Every trajectory that was started ends in exactly one row, if its attempt was not killed."""
    times = Counter(data.trajectories()["trajectory"].tolist())
    problems = [f"trajectory {one} has {count} rows" for one, count in times.items() if count > 1]
    by_attempt: dict[int, list[int]] = {}
    for trajectory in times:
        by_attempt.setdefault(attempt_of(trajectory), []).append(trajectory)
    attempts = {attempt.number: attempt for attempt in run.attempts}
    for number, found in by_attempt.items():
        if number not in attempts:
            problems.append(f"trajectory {min(found)} is of attempt {number}, which there is not")
    for attempt in run.attempts:
        if attempt.clean:
            problems += _missing(run, attempt, by_attempt.get(attempt.number, []))
    return Check("one row a trajectory", len(times), problems)


def _missing(run: RunDir, attempt: AttemptView, found: list[int]) -> list[str]:
    """Trajectories of an attempt that have no row. They are numbered without a gap."""
    if not found and not attempt.started:
        return []
    first = first_trajectory(attempt.number)
    missing = sorted(set(range(first, max(found, default=first) + 1)) - set(found))
    problems = [f"trajectory {one} has no row" for one in missing]
    started = attempt.started
    if started is None and run.metrics and len(run.attempts) == 1:
        started = run.metrics[-1]["counts"].get("started")
    if started is not None and not missing and started > len(found):
        where = f" in attempt {attempt.number}" if len(run.attempts) > 1 else ""
        problems.append(f"{started} trajectories were started{where}, {len(found)} have a row")
    return problems


def _token_truth(data: RunData) -> Check:
    """Invariant 5: every sampled token carries its log-prob and version, and rows agree with tokens."""
    problems: list[str] = []
    count = 0
    for shard in data:
        if not len(shard.rows):
            continue
        try:
            problems += _token_problems(shard)
        except StoreError as error:
            problems.append(str(error))
        count += len(shard.rows)
    return Check("tokens carry versions", count, problems)


def _token_problems(shard: Shard) -> list[str]:
    tokens, rows = shard.tokens(), shard.rows
    sampled = tokens.sampled == 1
    owner = np.repeat(np.arange(len(rows)), rows["token_count"].astype(np.int64))
    unmarked = (sampled != (tokens.version >= 0)) | (sampled != np.isfinite(tokens.logprob))
    problems = [
        f"{shard.path.name}, trajectory {rows['trajectory'][row]}: flags, log-probs and versions disagree"
        for row in np.unique(owner[unmarked])
    ]
    where, who = np.flatnonzero(sampled), owner[sampled]
    starts, ends = np.full(len(rows), -1), np.full(len(rows), -1)
    # Of repeated indices the last assignment stays: backwards for the first token, forwards for the last.
    starts[who[::-1]] = tokens.version[where[::-1]]
    ends[who] = tokens.version[where]
    for name, wanted in (("start_version", starts), ("end_version", ends)):
        for row in np.flatnonzero(rows[name] != wanted):
            problems.append(
                f"{shard.path.name}, trajectory {rows['trajectory'][row]}: {name} {rows[name][row]}, "
                f"its tokens say {wanted[row]}"
            )
    return problems


def _every_step(run: RunDir) -> Check:
    """metrics.jsonl has each step once, in order, whatever was done anew."""
    steps = [line["step"] for line in run.metrics]
    problems = [
        f"line {number + 1} of metrics.jsonl is of step {step}, not {number}"
        for number, step in enumerate(steps)
        if step != number
    ]
    return Check("every step once", len(steps), problems)


def _metrics(
    run: RunDir, consumed: NDArray[Any], found: NDArray[Any], rows: NDArray[Any], ended: bool
) -> Check:
    """metrics.jsonl repeats what the shards and batch logs say."""
    assert run.data is not None
    problems, by = [], run.data.consumed_by()
    for line in run.metrics:
        step = line["step"]
        batch = consumed["step"] == step
        mine = batch & found
        if not batch.any():
            problems.append(f"step {step}: in metrics.jsonl, but no batch log has it")
        elif "attempt" in line and (by[batch] != line["attempt"]).any():
            logged = by[batch][0]
            problems.append(f"step {step}: of attempt {line['attempt']}, logged by attempt {logged}")
        if not mine.any() or not (ended or found[batch].all()):
            continue
        expected: dict[str, float] = {
            f"reward of {run.data.tasks[task]}": float(rows["reward"][mine & (rows["task"] == task)].mean())
            for task in np.unique(rows["task"][mine])
        }
        reported = {f"reward of {name}": value for name, value in line.get("reward", {}).items()}
        lag = consumed["version"][mine].astype(np.int64) - rows["start_version"][mine]
        recounted = {
            "reward_mean": float(rows["reward"][mine].mean()),
            "staleness_mean": float(lag.mean()),
            "staleness_max": float(lag.max()),
            "trajectories": float(batch.sum()),
        }
        for name, value in recounted.items():
            if name in line:
                expected[name], reported[name] = value, line[name]
        reported = {name: value for name, value in reported.items() if value is not None}
        for name in sorted(expected.keys() | reported.keys()):
            mean, said = expected.get(name), reported.get(name)
            if (
                mean is None
                or said is None
                or not math.isclose(mean, said, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-9)
            ):
                problems.append(f"step {step}: {name} is {mean} by the shards, {said} in metrics.jsonl")
    return Check("metrics agree with shards", len(run.metrics), problems)
