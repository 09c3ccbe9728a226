"""What a person sees of a run, from what the run directory holds."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from hpc_rollart.coordinate.progress import Progress
from hpc_rollart.errors import UserError
from hpc_rollart.launch.progress import LiveDisplay, PlainDisplay, clock, make_display, sparkline, summary
from hpc_rollart.launch.view import RunView, close_status, failure_text, last_lines, reopen_status, tenths
from hpc_rollart.observe.status import StatusFile, read_status
from tests.launch.fake_rank import write_status


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in the middle: three of ten steps."""
    for step in range(3):
        add_step(tmp_path, step, reward=0.25 * (step + 1))
    show_status(tmp_path)
    return tmp_path


def add_step(path: Path, step: int, reward: float) -> None:
    line = {"step": step, "reward": {"lake": reward}, "reward_mean": reward, "tokens_per_s": 1234.5,
            "staleness_mean": 0.5, "wait_batch_s": 0.25, "train_s": 1.5, "publish_s": 0.125}  # fmt: skip
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def show_status(path: Path, **fields: object) -> None:
    base = {"step": 3, "steps": 10, "t_start": 1000.0, "eta_s": 70.0, "tokens_per_s": 1234.5, "in_flight": 17,
            "tasks": {"lake": {"reward": 0.3, "trajectories": 2048, "failed": 2}},
            "staleness": {"mean": 0.41, "max": 1}, "groups": {"open": 5, "complete": 2},
            "waits": {"trainer_batch_s": 0.25, "trainer_train_s": 1.5, "exposed_s": 0.0042}}  # fmt: skip
    write_status(path, **(base | fields))


def drawn(path: Path, *, width: int = 100, stopping: bool = False, encoding: str = "utf-8") -> str:
    """Return the text of the live panel."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, force_terminal=True, width=width, record=True)
    display = LiveDisplay(RunView(path), "demo", console)
    display.update(stopping=stopping)
    display.close()
    console.export_text()
    console.print(display.render())
    return console.export_text()


def test_live_panel_shows_rewards_throughput_staleness_and_waits(run: Path) -> None:
    text = drawn(run)
    assert re.search(r"● demo  running .* elapsed · 1:10 left", text)
    assert "step 3 of 10" in text
    assert re.search(r"lake +▁▅█ +0\.250 +0\.750 +2,048 +2\b", text)
    assert re.search(r"tokens/s +1,23[45] +trainer waits for data +0\.25 s", text)
    assert re.search(r"staleness +mean 0\.41, max 1 +training +1\.50 s", text)
    assert re.search(r"in flight +17 +publishing weights +–", text)
    assert re.search(r"groups +5 open, 2 complete +generators paused +4\.2 ms", text)


def test_live_panel_says_what_a_start_waits_for(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    display = LiveDisplay(RunView(tmp_path), "demo", console)
    display.phase("starting 4 ranks (env 2, trainer 1, generate 1)")
    display.close()
    assert "starting 4 ranks (env 2, trainer 1, generate 1) …" in console.export_text()


def test_live_panel_says_how_to_stop_at_once_while_stopping(run: Path) -> None:
    text = drawn(run, stopping=True)
    assert "demo  stopping" in text
    assert "press Ctrl-C again" in text


def test_live_panel_tells_when_the_coordinator_is_silent(run: Path) -> None:
    show_status(run, t=1000.0)
    assert "no news from the coordinator for" in drawn(run)


def test_live_panel_fits_a_narrow_terminal(run: Path) -> None:
    text = drawn(run, width=60)
    assert max(len(line) for line in text.splitlines()) <= 60
    assert re.search(r"lake +▁▅█ +0\.250 +0\.750 +2\b", text)
    assert re.search(r"trainer waits for data +0\.25 s", text)


def test_live_panel_draws_with_ascii_where_the_terminal_has_nothing_else(run: Path) -> None:
    assert "_+@" in drawn(run, encoding="ascii")


def test_anything_but_a_terminal_gets_one_line_a_step_in_stable_columns(run: Path) -> None:
    console = Console(file=io.StringIO(), width=40)
    display = make_display(run, "demo", console, live=True)
    assert isinstance(display, PlainDisplay)
    display.update()
    add_step(run, 3, reward=0.4)
    display.update()
    display.close()
    head, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split() == ["step", "reward", "tokens/s", "stale", "wait", "s", "train", "s", "publish", "s"]
    assert [line.split()[:2] for line in lines] == [
        ["1/10", "0.250"],
        ["2/10", "0.500"],
        ["3/10", "0.750"],
        ["4/10", "0.400"],
    ]
    assert {len(line) for line in lines} == {len(head)}


def test_terminal_gets_lines_too_when_asked(run: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(make_display(run, "demo", console, live=False), PlainDisplay)


def test_half_written_line_of_metrics_is_left_for_the_next_look(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
        file.flush()
        view = RunView(run)
        view.refresh()
        assert len(view.steps) == 3
        file.write('ard": {"lake": 0.4}}\n')
    view.refresh()
    assert view.rewards("lake") == pytest.approx([0.25, 0.5, 0.75, 0.4])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '"text"',
        "{}",
        '{"step": "3"}',
        '{"step": 3, "reward": [1]}',
        '{"step": 3, "train_s": "1"}',
    ],
)
def test_damaged_line_of_metrics_is_an_error_that_names_it(run: Path, line: str) -> None:
    view = RunView(run)
    view.refresh()
    with open(run / "metrics.jsonl", "a") as file:
        file.write(f"{line}\n")
    add_step(run, 4, reward=0.5)
    for looker in (view, RunView(run)):
        with pytest.raises(UserError, match=r"metrics\.jsonl:4: not the line of a step .*; remove it"):
            looker.refresh()


def test_metrics_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be read: Is a directory"):
        RunView(tmp_path).refresh()


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"t": "now"}, r"\$\.t"),
        ({"t_start": None}, r"\$\.t_start"),
        ({"step": "3"}, r"\$\.step"),
        ({"steps": [10]}, r"\$\.steps"),
        ({"eta_s": "soon"}, r"\$\.eta_s"),
        ({"state": 3}, r"\$\.state"),
        ({"message": {}}, r"\$\.message"),
        ({"staleness": [0.5, 1]}, r"\$\.staleness"),
        ({"staleness": {"max": 1}}, "`mean` and `max`"),
        ({"tasks": ["lake"]}, r"\$\.tasks"),
        ({"tasks": {"lake": {"failed": "2"}}}, r"\$\.tasks"),
        ({"waits": {"publish_s": "1"}}, r"\$\.waits"),
        ({"groups": {"open": None}}, r"\$\.groups"),
        ({"tokens_per_s": "12"}, r"\$\.tokens_per_s"),
        ({"in_flight": 1.5}, r"\$\.in_flight"),
    ],
)
def test_status_of_other_types_is_an_error_that_names_the_key(
    run: Path, fields: dict[str, object], key: str
) -> None:
    show_status(run, **fields)
    with pytest.raises(
        UserError, match=rf"status\.json: not a run's status \(.*{key}.*\); remove it to read on"
    ):
        RunView(run).refresh()


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"t": NaN}'])
def test_status_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(UserError, match=r"status\.json: not a run's status"):
        read_status(tmp_path)


def test_what_the_coordinator_writes_is_a_status(tmp_path: Path) -> None:
    progress = Progress(["lake"], 10, 0, 0)
    StatusFile(tmp_path).write(progress.status("running", "", 0, {"open": 0, "complete": 0}))
    assert (read_status(tmp_path) or {})["steps"] == 10


def test_how_a_run_ended_is_written_over_a_damaged_status(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"step": "3"}')
    (tmp_path / "metrics.jsonl").write_text("{\n")
    close_status(tmp_path, "failed", "out of luck")
    view = RunView(tmp_path, status=read_status(tmp_path) or {})
    assert (view.state, view.message) == ("failed", "out of luck")
    (tmp_path / "status.json").write_text("{")
    reopen_status(tmp_path, "once more")
    assert (read_status(tmp_path) or {})["state"] == "starting"


def test_summary_compares_the_first_tenth_with_the_last(run: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    show_status(run, state="done", t=1090.0)
    summary(run, console, run / "report.html")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"lake +0\.250 +0\.750 +\+0\.500", text)
    assert re.search(r"wall time +1:30", text)
    assert str(run / "report.html") in text


def test_tenths_are_means_of_at_least_one_step() -> None:
    assert tenths([]) is None
    assert tenths([2.0]) == (2.0, 2.0)
    assert tenths([float(n) for n in range(20)]) == (0.5, 18.5)


def test_sparkline_scales_from_low_to_high_and_never_exceeds_its_width() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline([0.0, 1.0], 8) == "▁█"
    assert len(sparkline([float(n) for n in range(1000)], 24)) == 24


def test_clock_reads_as_people_write_it() -> None:
    assert [clock(s) for s in (0, 7, 760, 11110)] == ["0:00", "0:07", "12:40", "3:05:10"]


@pytest.mark.parametrize("text", ["{", "[]", '{"rank": 1, "error": "out of luck"}', '{"rank": "1"}'])
def test_damaged_record_of_a_failure_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    (tmp_path / "logs" / "0" / "failure.json").write_text(text)
    assert failure_text(tmp_path, 0) == ""


def test_failure_without_a_record_or_log_says_nothing(tmp_path: Path) -> None:
    assert failure_text(tmp_path, 0) == ""
    assert last_lines(tmp_path / "mpirun.log", 5) == []
