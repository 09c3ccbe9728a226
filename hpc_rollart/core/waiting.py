"""Members that wait to be dispatched: for a free slot, or for their back-off to be over."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple


class Place(NamedTuple):
    """Which attempt of which member waits; sorts by group, so that older groups are finished first."""

    group: int
    member: int
    attempt: int


class WaitingList:
    """Two heaps: by due time until it has come, then by group.

    Places whose group has gone meanwhile are left in and passed over when they surface: `wanted` tells.
    """

    def __init__(self, wanted: Callable[[Place], bool]) -> None:
        self._wanted = wanted
        self._later: list[tuple[float, Place]] = []
        self._ready: list[Place] = []

    def add(self, place: Place) -> None:
        """Let the place be dispatched as soon as there is a slot."""
        heappush(self._ready, place)

    def add_later(self, due: float, place: Place) -> None:
        """Let the place be dispatched not before `due`."""
        heappush(self._later, (due, place))

    def pop(self, now: float) -> Place | None:
        """Take the next place to dispatch, None if none is due."""
        while self._later and self._later[0][0] <= now:
            heappush(self._ready, heappop(self._later)[1])
        while self._ready:
            place = heappop(self._ready)
            if self._wanted(place):
                return place
        return None

    def next_due(self, now: float) -> float | None:
        """When the first place that still has to wait becomes due."""
        while self._later and (self._later[0][0] <= now or not self._wanted(self._later[0][1])):
            heappush(self._ready, heappop(self._later)[1])
        return self._later[0][0] if self._later else None
