"""Records what one rank did when, as one JSON object a line, cheaply enough to leave on."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec

FLUSH_EVERY_S = 1.0
# A burst beyond this is written at once, so that memory stays bounded between two timed flushes.
MAX_BUFFERED = 4096

# A block of buffered events is far shorter, so a torn line begins within it.
_LONGEST_BLOCK = 1 << 24

_encode = msgspec.json.Encoder().encode


class Timeline:
    """Writes ``<directory>/<component>-<rank>.jsonl``; a later attempt of the rank appends to it.

    Events are ``{"name", "cat", "t", "d", ...args}``: start in Unix seconds, duration in seconds. They
    are buffered and reach the file in whole lines about once a second and at `close`, so a killed rank
    loses the last second at most. Not safe for several threads.
    """

    def __init__(self, directory: Path, component: str, rank: int) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{component}-{rank}.jsonl"
        self._fd = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600)
        _end_the_last_line(self._fd)
        # (name, category, start, duration, args): turned into JSON when written, not when recorded.
        self._events: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self._flushed_at = time.time()

    def event(self, name: str, cat: str, t: float, d: float, **args: Any) -> None:
        """Record something that began at `t` (Unix seconds) and took `d` seconds.

        `cat` is one of generate, train, weights, wait, env and store.
        """
        self._events.append((name, cat, t, d, args))
        # The event's own end serves as the clock: no system call for most events.
        if t + d - self._flushed_at >= FLUSH_EVERY_S or len(self._events) >= MAX_BUFFERED:
            self.flush()

    def span(self, name: str, cat: str, **args: Any) -> "Span":
        """Record how long the body of a ``with`` took; what it puts into the yielded dict goes along."""
        return Span(self, name, cat, args)

    def flush(self) -> None:
        """Write everything recorded so far."""
        self._flushed_at = time.time()
        if self._events:
            events, self._events = self._events, []
            lines = [_encode({"name": n, "cat": c, "t": t, "d": d, **args}) for n, c, t, d, args in events]
            os.write(self._fd, b"\n".join(lines) + b"\n")

    def close(self) -> None:
        """Flush and close; calling it twice is fine."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _end_the_last_line(fd: int) -> None:
    """Cut off the part of a line that a killed writer left, lest the next line becomes one with it."""
    size = os.fstat(fd).st_size
    if not size or os.pread(fd, 1, size - 1) == b"\n":
        return
    tail = os.pread(fd, min(size, _LONGEST_BLOCK), max(0, size - _LONGEST_BLOCK))
    os.ftruncate(fd, size - len(tail) + tail.rfind(b"\n") + 1)


class Span:
    """One timed ``with`` block; recorded when the block raises, too: what failed is what one looks for."""

    __slots__ = ("_args", "_cat", "_name", "_start", "_timeline")

    def __init__(self, timeline: Timeline, name: str, cat: str, args: dict[str, Any]) -> None:
        self._timeline = timeline
        self._name = name
        self._cat = cat
        self._args = args

    def __enter__(self) -> dict[str, Any]:
        self._start = time.time()
        return self._args

    def __exit__(self, *exc_info: object) -> None:
        self._timeline.event(self._name, self._cat, self._start, time.time() - self._start, **self._args)


class Coalescer:
    """Merges the engine's many short busy steps into few spans.

    Steps closer together than `max_gap_s` count as one busy span; a span is closed once it is
    `max_span_s` long, so that a timeline of a running rank is never far behind.

    Parameters
    ----------
    timeline, name, cat
        Where the spans go, and as what.
    """

    def __init__(
        self,
        timeline: Timeline,
        name: str = "generate",
        cat: str = "generate",
        *,
        max_gap_s: float = 0.005,
        max_span_s: float = 1.0,
    ) -> None:
        self._timeline = timeline
        self._name = name
        self._cat = cat
        self._max_gap_s = max_gap_s
        self._max_span_s = max_span_s
        self._start = 0.0
        self._end = 0.0
        self._steps = 0

    def busy(self, t0: float, t1: float) -> None:
        """One step ran from `t0` to `t1` (Unix seconds); call in order of time."""
        if self._steps and (t0 - self._end >= self._max_gap_s or t1 - self._start > self._max_span_s):
            self.flush()
        if not self._steps:
            self._start = t0
        self._end = t1
        self._steps += 1

    def flush(self) -> None:
        """Close the open span: call it when the engine falls idle and before the timeline closes."""
        if self._steps:
            self._timeline.event(
                self._name, self._cat, self._start, self._end - self._start, steps=self._steps
            )
            self._steps = 0
