"""A rank's timeline holds what happened, in whole lines, and engine steps as few spans."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rollart.observe.timeline import Coalescer, Timeline
from hpc_rollart.observe.trace import merge_timelines, read_timeline, read_timelines

ROOT = Path(__file__).parents[2]


def test_events_are_one_json_object_a_line(tmp_path: Path):
    with Timeline(tmp_path, "env", 4) as line:
        line.event("reset", "env", 100.0, 0.5, trajectory=7)
        line.event("step", "env", 101.0, 0.25, trajectory=7, turn=0)
    lines = [json.loads(text) for text in (tmp_path / "env-4.jsonl").read_text().splitlines()]
    assert lines == [
        {"name": "reset", "cat": "env", "t": 100.0, "d": 0.5, "trajectory": 7},
        {"name": "step", "cat": "env", "t": 101.0, "d": 0.25, "trajectory": 7, "turn": 0},
    ]


def test_a_span_is_recorded_with_what_its_body_adds_even_when_that_raises(tmp_path: Path):
    with Timeline(tmp_path, "env", 4) as line:
        with line.span("fetch", "wait", step=3) as args:
            args["tokens"] = 12
        with pytest.raises(ZeroDivisionError), line.span("score", "env"):
            1 / 0  # noqa: B018
    fetch, score = read_timeline(tmp_path / "env-4.jsonl")
    assert (fetch.name, fetch.cat, fetch.args) == ("fetch", "wait", {"step": 3, "tokens": 12})
    assert score.name == "score" and 0 <= score.d < 60
    assert score.t > 1.6e9


def test_events_reach_the_file_about_once_a_second_without_close(tmp_path: Path):
    line = Timeline(tmp_path, "env", 4)
    now = line._flushed_at
    line.event("step", "env", now, 0.5)
    assert line.path.read_text() == ""
    line.event("step", "env", now + 0.9, 0.5)
    assert len(line.path.read_text().splitlines()) == 2
    line.close()


def test_a_restarted_rank_appends_to_its_timeline(tmp_path: Path):
    for attempt in range(2):
        with Timeline(tmp_path, "env", 4) as line:
            line.event("reset", "env", 100.0 + attempt, 0.5)
    assert [event.t for event in read_timeline(tmp_path / "env-4.jsonl")] == [100.0, 101.0]


def test_a_killed_rank_leaves_whole_lines(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from hpc_rollart.observe.timeline import Timeline\n"
        "line = Timeline(Path(sys.argv[1]), 'env', 4)\n"
        "while True:\n"
        "    line.event('step', 'env', 1e9, 0.5, note='x' * 50); line.flush(); print(flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(200):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert len(read_timeline(tmp_path / "env-4.jsonl")) >= 200


def test_a_torn_last_line_is_passed_over(tmp_path: Path):
    with Timeline(tmp_path, "env", 4) as line:
        line.event("reset", "env", 100.0, 0.5)
    with open(line.path, "a") as file:
        file.write('{"name": "st')
    assert [event.name for event in read_timeline(line.path)] == ["reset"]


def coalesced(tmp_path: Path, steps: list[tuple[float, float]]) -> list[tuple[float, float, int]]:
    with Timeline(tmp_path, "generate", 1) as line:
        busy = Coalescer(line)
        for step in steps:
            busy.busy(*step)
        busy.flush()
    spans = [(event.t, event.end, event.args["steps"]) for event in read_timeline(line.path)]
    line.path.unlink()
    return spans


def test_adjacent_engine_steps_become_one_span(tmp_path: Path):
    spans = coalesced(tmp_path, [(10.0, 10.1), (10.101, 10.2), (10.204, 10.3), (10.31, 10.4)])
    assert spans == [(10.0, 10.3, 3), (10.31, 10.4, 1)]


def test_a_span_is_closed_after_a_second(tmp_path: Path):
    spans = coalesced(tmp_path, [(10 + i / 10, 10 + (i + 1) / 10) for i in range(25)])
    assert [count for _, _, count in spans] == [10, 10, 5]


@given(st.lists(st.tuples(st.floats(0.001, 0.6), st.floats(0, 0.02)), min_size=1, max_size=40))
def test_coalescing_loses_no_busy_time_and_adds_only_short_gaps(tmp_path_factory, lengths):
    steps, now = [], 100.0
    for busy, gap in lengths:
        steps.append((now, now + busy))
        now += busy + gap
    spans = coalesced(tmp_path_factory.getbasetemp(), steps)
    assert sum(count for _, _, count in spans) == len(steps)
    spanned = sum(end - start for start, end, _ in spans)
    exact = sum(end - start for start, end in steps)
    assert exact - 1e-6 <= spanned <= exact + 0.005 * len(steps) + 1e-6
    assert all(end - start <= 1.0 + 1e-6 for start, end, _ in spans)


def test_timelines_merge_into_a_trace_with_a_process_per_component_and_a_thread_per_rank(tmp_path: Path):
    for component, rank in (("trainer", 0), ("env", 10), ("env", 2)):
        with Timeline(tmp_path / "timeline", component, rank) as line:
            line.event("a", "train", 100.0 + rank, 2.0, step=1)
            line.event("b", "train", 100.5 + rank, 0.5)
    assert list(read_timelines(tmp_path)) == [("trainer", 0), ("env", 2), ("env", 10)]
    out = tmp_path / "trace.json"
    assert merge_timelines(tmp_path, out) == 6
    entries = json.loads(out.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert list(processes.values()) == ["trainer", "env"]
    spans = [e for e in entries if e["ph"] == "X"]
    named = {
        (processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"]): (e["ts"], e["dur"]) for e in spans
    }
    assert named["trainer", "rank 0", "a"] == (0.0, 2e6)
    # Overlapping spans of one rank get lanes of their own, else Perfetto would drop them.
    assert named["env", "rank 10 (2)", "b"] == (10.5e6, 0.5e6)
    assert {e["args"].get("step") for e in spans if e["name"] == "a"} == {1}


def test_a_run_without_timelines_is_one_clear_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no timeline"):
        merge_timelines(tmp_path, tmp_path / "trace.json")


def test_a_later_attempt_appends_after_a_line_that_a_kill_tore(tmp_path: Path) -> None:
    with Timeline(tmp_path, "env", 4) as line:
        line.event("episode", "env", 1.0, 0.5)
    with line.path.open("ab") as file:
        file.write(b'{"name": "epis')
    with Timeline(tmp_path, "env", 4) as line:
        line.event("episode", "env", 9.0, 0.5)
    assert [event.t for event in read_timeline(line.path)] == [1.0, 9.0]
