"""The shard and batch-log layout, written down once: names, dtypes and code lists, and nothing that acts.

The layout is public: an auditor reads it with h5py alone (see ``docs`` and the tests, which do). Adding a
name to the end of a code list or an attribute is compatible; anything else raises the format version.
"""

from typing import Final

import numpy as np

SHARD_FORMAT: Final = "rollart-trajectories"
SHARD_VERSION: Final = 1
BATCH_FORMAT: Final = "rollart-batches"
BATCH_VERSION: Final = 1

STATUSES: Final = ("ok", "stale", "surplus", "env_failed", "reward_failed", "lost")
"""What became of a trajectory. Only ``ok`` ones may be consumed; failures never count as a reward."""

STOPS: Final = (
    "terminated",  # the environment says the task is over
    "truncated",  # the environment ran out of its own time limit
    "max_turns",
    "max_context",  # the next turn would not fit the model's context
    "cancelled",  # the coordinator ended it (stale or surplus)
    "reset_error",
    "step_error",
    "reset_timeout",
    "step_timeout",
    "worker_died",
    "bad_observation",
    "score_error",
    "rank_lost",
    "run_ended",  # in flight when the last step was done
    "interrupted",  # in flight when the run was told to stop early, or failed
)
"""Why a trajectory ended."""

NO_POOL: Final = -1
"""``pool`` and ``generator`` of a trajectory that no replica ever served."""

TOKEN_COLUMNS: Final[dict[str, np.dtype]] = {
    "id": np.dtype("<i4"),
    "logprob": np.dtype("<f4"),
    "version": np.dtype("<i4"),
    "sampled": np.dtype("u1"),
}
"""Datasets of ``/tokens``, each of shape (T,)."""

TRAJECTORY: Final = np.dtype(
    [
        ("trajectory", "<u8"),
        ("group", "<u8"),
        ("task", "u1"),
        ("status", "u1"),
        ("stop", "u1"),
        ("seed", "<u8"),
        ("start_version", "<i4"),  # -1: no token was sampled
        ("end_version", "<i4"),
        ("reward", "<f8"),  # NaN: never scored
        ("turns", "<i4"),
        ("token_offset", "<u8"),
        ("token_count", "<u8"),
        ("turn_offset", "<u8"),
        ("text_offset", "<u8"),
        ("text_count", "<u8"),
        ("pool", "<i2"),
        ("generator", "<i2"),
        ("t_admitted", "<f8"),  # Unix seconds; NaN: it never got there
        ("t_started", "<f8"),
        ("t_finished", "<f8"),
        ("t_scored", "<f8"),
    ]
)
"""One row of ``/trajectories``; offsets count elements of this shard's own flat arrays."""

TURN: Final = np.dtype(
    [
        ("trajectory", "<u8"),
        ("turn", "<i4"),
        ("context_count", "<i4"),  # tokens that the turn added before sampling
        ("sampled_count", "<i4"),
        ("reward", "<f8"),
        ("t_generate", "<f8"),  # seconds
        ("t_step", "<f8"),
    ]
)
"""One row of ``/turns``."""

CONSUMED: Final = np.dtype(
    [
        ("step", "<i4"),
        ("trajectory", "<u8"),
        ("group", "<u8"),
        ("staleness", "<i4"),  # version - start_version
        ("advantage", "<f8"),
        ("version", "<i4"),  # weight version that the step trained from
    ]
)
"""One row of ``/consumed`` in ``batches/<attempt>.h5``."""

_ATTEMPT_SHIFT = 40


def first_trajectory(attempt: int) -> int:
    """Id of an attempt's first trajectory: every attempt has 2**40 of its own, so that none has another's."""
    return attempt << _ATTEMPT_SHIFT


def attempt_of(trajectory: int) -> int:
    """Attempt that started a trajectory."""
    return trajectory >> _ATTEMPT_SHIFT
