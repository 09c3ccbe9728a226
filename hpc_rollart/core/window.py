"""The staleness window: how many groups may be open, and which trajectories are still valid.

ROLLART section 4 (bounded staleness): a trajectory that started at version b is valid at version n
iff n - b <= alpha.
"""

from .types import Rules


def window_batches(rules: Rules, step: int, version: int) -> int:
    """Batches whose groups may be open when `step` were cut and `version` is the lowest installed.

    A new group behind q open ones is consumed by batch step + q // B, trained from that version, and starts
    at `version` at the earliest. It is of use only if step + q // B - version <= alpha, that is if
    q < B * (alpha + version - step + 1); and only if that batch is one the run still trains on.
    """
    return max(0, min(rules.alpha + version - step + 1, rules.total_steps - step))


def window_groups(rules: Rules, step: int, version: int) -> int:
    """Groups that may be open: those the window's batches consume, and the redundant ones of each batch."""
    return window_batches(rules, step, version) * (rules.groups_per_batch + rules.redundant_groups)
