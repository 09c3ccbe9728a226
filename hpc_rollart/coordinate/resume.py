"""The coordinator's part of a checkpoint: what it holds, and the ledger that goes on from it."""

import json
from collections.abc import Collection
from typing import Any

from hpc_rollart.config.schema import RunConfig
from hpc_rollart.coordinate.progress import Progress
from hpc_rollart.core import types as core
from hpc_rollart.core.ledger import Ledger
from hpc_rollart.core.state import LedgerState
from hpc_rollart.rank import RankContext
from hpc_rollart.store.checkpoints import read_ledger
from hpc_rollart.store.schema import first_trajectory


def pack_state(ledger: Ledger, progress: Progress, cut: Collection[int]) -> bytes:
    """Return what a later attempt goes on from, as JSON; right after the batch of trajectories `cut`."""
    return json.dumps({"ledger": ledger.state().plain(), "progress": progress.state(cut)}).encode()


def saved_state(context: RankContext) -> dict[str, Any] | None:
    """Read what `pack_state` gave an earlier attempt; None for a run that begins.

    Raises
    ------
    UserError
        The checkpoint does not hold it.
    """
    if context.checkpoint is None or context.step == 0:
        return None
    return read_ledger(context.checkpoint, context.step)


def make_ledger(context: RankContext, saved: dict[str, Any] | None) -> Ledger:
    """Make the ledger of this attempt."""
    config = context.config
    return Ledger(
        _rules(config),
        [core.Task(task.name, task.weight, task.affinity) for task in config.tasks],
        state=LedgerState.from_plain(saved["ledger"]) if saved else None,
        first_trajectory=first_trajectory(context.attempt),
    )


def _rules(config: RunConfig) -> core.Rules:
    algorithm, schedule = config.algorithm, config.schedule
    return core.Rules(
        group_size=algorithm.group_size,
        groups_per_batch=algorithm.groups_per_batch,
        total_steps=config.run.steps,
        seed=config.run.seed,
        alpha=schedule.alpha,
        mode=schedule.mode,
        redundant_groups=schedule.redundancy.groups,
        redundant_members=schedule.redundancy.members,
        share_patience=schedule.share_patience,
        # A hold is no stall, and the trainer's own deadline must not end it.
        share_hold_max_s=config.launch.stall_deadline_s / 4,
        retry_attempts=schedule.retry.attempts,
        backoff_s=schedule.retry.backoff_s,
        backoff_max_s=schedule.retry.backoff_max_s,
    )
