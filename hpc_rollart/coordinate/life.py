"""Which ranks have been silent for too long: a node that is down or cut off closes no connection."""


class LifeSigns:
    """When each rank was last heard of, on a steady clock.

    A coordinator that was itself held up has not read what the others sent meanwhile. So what counts is the
    time that it was looking: a gap between two looks counts as one ordinary pause.

    Parameters
    ----------
    limit_s
        Seconds of silence after which a rank is taken for lost.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._longest_pause_s = limit_s / 6
        self._looked: float | None = None
        self._silent_s: dict[int, float] = {}

    def heard(self, rank: int) -> None:
        """The rank is at work."""
        self._silent_s[rank] = 0.0

    def forget(self, rank: int) -> None:
        """The rank has taken its leave: nothing more is expected of it."""
        self._silent_s.pop(rank, None)

    def silent(self, now: float) -> set[int]:
        """Ranks that were heard of, but not for `limit_s`."""
        pause_s = 0.0 if self._looked is None else min(now - self._looked, self._longest_pause_s)
        self._looked = now
        for rank in self._silent_s:
            self._silent_s[rank] += pause_s
        return {rank for rank, silent_s in self._silent_s.items() if silent_s > self._limit_s}
