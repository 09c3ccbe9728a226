"""Decides how long a rank rests between two polls: quick while messages flow, cheap when they do not."""

import asyncio
import time

SPIN_POLLS = 16
"""A pass of the event loop costs as much as this many polls that find nothing."""

SHORTEST_NAP_S = 0.001
"""Timers of the event loop are no finer than this."""

NAP_SHARE = 1 / 16
"""A rank that heard nothing for a while sleeps this part of that while, so it is late by no more."""

DOZE_S, DOZES = 0.0001, 1.5
"""After spinning, a rank pauses this long between polls for a few `idle_s`: long enough that the answer of
a peer which had to wake up still finds it nearly awake. Two ranks that each nap while the other answers
would never fall into step, and every round trip would cost two naps."""


class Pace:
    """Rests between polls: spin for `spin_s` after traffic, then doze, then nap up to `idle_s` at a time."""

    def __init__(self, spin_s: float, idle_s: float) -> None:
        self._spin_s = spin_s
        self._idle_s = idle_s
        self._last_traffic = 0.0
        self._nap: asyncio.Future[None] | None = None

    def polls(self, now: float) -> int:
        """How many empty polls to make before the event loop has its turn."""
        return SPIN_POLLS if now - self._last_traffic < self._spin_s else 1

    def traffic(self, now: float) -> None:
        """A message came at `now`, on the clock of `time.perf_counter`."""
        self._last_traffic = now

    def rouse(self) -> None:
        """Something was sent: an answer is likely near, so end a nap."""
        self._last_traffic = time.perf_counter()
        if self._nap is not None:
            self._wake()

    async def rest(self, now: float, moving: bool) -> None:
        """Let other tasks run, for as long as the quiet before `now` suggests.

        `moving` says that transfers are in flight: they only move while MPI is called.
        """
        quiet_s = now - self._last_traffic
        if quiet_s < self._spin_s:
            await asyncio.sleep(0)
        elif quiet_s < DOZES * self._idle_s:
            # Timers of the event loop are too coarse for this; so short a pause harms no other task.
            time.sleep(DOZE_S)
            await asyncio.sleep(0)
        else:
            nap_s = 0.0 if moving else quiet_s * NAP_SHARE
            await self._sleep(min(max(nap_s, SHORTEST_NAP_S), self._idle_s))

    async def _sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._nap = loop.create_future()
        timer = loop.call_later(seconds, self._wake)
        try:
            await self._nap
        finally:
            timer.cancel()
            self._nap = None

    def _wake(self) -> None:
        if self._nap is not None and not self._nap.done():
            self._nap.set_result(None)
