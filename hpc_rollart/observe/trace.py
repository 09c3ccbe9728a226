"""Merges the ranks' timelines into one trace that Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Event:
    """One span of one rank; `t` Unix seconds, `d` seconds."""

    name: str
    cat: str
    t: float
    d: float
    args: dict[str, Any]

    @property
    def end(self) -> float:
        return self.t + self.d


def read_timeline(path: Path) -> list[Event]:
    """Events of one rank's file, in order of start; a last line torn by a kill is passed over."""
    events = []
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                event = msgspec.json.decode(line)
                events.append(
                    Event(event.pop("name"), event.pop("cat"), event.pop("t"), event.pop("d"), event)
                )
    events.sort(key=lambda event: event.t)
    return events


def read_timelines(run_dir: Path) -> dict[tuple[str, int], list[Event]]:
    """Events of every rank of a run, keyed by (component, rank), in order of rank."""
    found = {}
    for path in (Path(run_dir) / "timeline").glob("*.jsonl"):
        component, _, rank = path.stem.rpartition("-")
        found[component, int(rank)] = read_timeline(path)
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def merge_timelines(run_dir: Path, out: Path) -> int:
    """Write all timelines of `run_dir` to `out` in the Chrome trace format.

    Every component is a process and every rank a thread of it; times count from the first event.

    Returns
    -------
    int
        How many events were written.

    Raises
    ------
    FileNotFoundError
        The run has no timeline.
    """
    timelines = read_timelines(run_dir)
    if not timelines:
        raise FileNotFoundError(f"{Path(run_dir) / 'timeline'} holds no timeline: nothing to merge")
    count = 0
    with open(out, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for entry in _entries(timelines):
            file.write((",\n" if count else "") + json.dumps(entry))
            count += 1
        file.write("\n]}\n")
    return sum(len(events) for events in timelines.values())


def _entries(timelines: dict[tuple[str, int], list[Event]]) -> Iterator[dict[str, Any]]:
    origin = min((events[0].t for events in timelines.values() if events), default=0.0)
    components = list(dict.fromkeys(component for component, _ in timelines))
    for number, component in enumerate(components, 1):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": component}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
    for (component, rank), events in timelines.items():
        pid = components.index(component) + 1
        # Spans of one thread must nest, and an env rank's episodes overlap: each lane gets its thread.
        lanes: list[float] = []
        for event in events:
            lane = next((i for i, end in enumerate(lanes) if end <= event.t + 1e-9), len(lanes))
            if lane == len(lanes):
                lanes.append(0.0)
                name = f"rank {rank}" if lane == 0 else f"rank {rank} ({lane + 1})"
                yield {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": pid,
                    "tid": rank * 1000 + lane,
                    "args": {"name": name},
                }
            lanes[lane] = event.end
            yield {
                "ph": "X",
                "name": event.name,
                "cat": event.cat,
                "pid": pid,
                "tid": rank * 1000 + lane,
                "ts": round((event.t - origin) * 1e6, 1),
                "dur": round(event.d * 1e6, 1),
                "args": event.args,
            }
