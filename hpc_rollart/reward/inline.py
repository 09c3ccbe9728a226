"""Scores an episode on the env rank that played it, as soon as it ends."""

import math


class RewardFailure(Exception):
    """The episode could not be scored; it is recorded as `reward_failed`, never as a reward of 0."""


def episode_return(rewards: list[float]) -> float:
    """The undiscounted return: the sum of the environment's rewards over the turns.

    Parameters
    ----------
    rewards
        The environment's reward of each turn, in order.

    Raises
    ------
    RewardFailure
        There is no turn to score, or the sum is not a finite number.
    """
    if not rewards:
        raise RewardFailure("the episode has no turn to score: its first prompt fills model.max_context")
    total = math.fsum(rewards)
    if not math.isfinite(total):
        raise RewardFailure(f"the return is {total}")
    return total
