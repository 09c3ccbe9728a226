"""The report is one safe, self-contained page that says what happened, however little that was."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpc_rollart.analysis.report import duration, quantity, write_report
from hpc_rollart.analysis.rundir import open_run_dir
from hpc_rollart.analysis.summary import summarise
from tests.analysis.fake_run import make_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> ' \" & \x00 \ud83d"


class Page(HTMLParser):
    """Elements and visible text of a report."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(path.read_text())
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag
            if tag == "script":
                self.scripts.append("")

    def handle_endtag(self, tag):
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.words.append(data)

    def charts(self) -> set[str | None]:
        return {attrs["id"] for _, attrs in self.elements if attrs.get("class") == "chart"}

    def specs(self) -> dict:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), 40)


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(write_report(run))


def test_the_verdict_of_each_task_comes_first(page: Page):
    assert page.text.index("Reward improved on both tasks.") < page.text.index("Learning")
    for task in ("frozen-lake", "chain-sum"):
        assert re.search(rf"{task} 0\.\d{{3}} 0\.\d{{3}} \+0\.\d{{3}} ± 0\.\d{{3}} improved 320", page.text)


def test_the_headline_numbers_are_those_of_the_shards(page: Page, run: Path):
    summary = summarise(open_run_dir(run))
    assert summary.steps == 40 and summary.trained == 640
    assert sum(summary.statuses.values()) == summary.trajectories
    assert "Steps 40 of 60" in page.text
    assert f"Trajectories {summary.trajectories:,} 640 trained on" in page.text
    data = open_run_dir(run).data
    assert data is not None
    consumed = data.consumed()["trajectory"].tolist()
    assert summary.trained_tokens == sum(int(data.tokens_of(one).sampled.sum()) for one in consumed)
    assert "Largest staleness 1 bound 1" in page.text
    assert re.search(r"Generation hidden \d\d%", page.text)


def test_every_chart_has_its_place_and_its_data(page: Page):
    small = {"loss", "grad_norm", "entropy", "kl_behaviour", "clip_fraction", "correction_mean"}
    wanted = {"rewards", "staleness", "throughput", "step-times", "role-times", "strip"}
    assert page.charts() == set(page.specs()) == wanted | {f"small-{name}" for name in small}
    rewards = page.specs()["rewards"]["data"]
    assert {trace["name"] for trace in rewards} == {"frozen-lake", "chain-sum"}
    assert all(trace["x"] == list(range(40)) for trace in rewards)
    assert len(page.specs()["strip"]["layout"]["yaxis"]["categoryarray"]) == 5


def test_failures_are_listed_by_reason(page: Page):
    assert "Not trained on, by reason" in page.text
    assert "worker_died" in page.text and "worker ended with signal 9" in page.text


def test_samples_show_the_conversation_with_what_was_sampled_marked(page: Page):
    for label in ("early worst", "early best", "late worst", "late best"):
        assert label in page.text
    sampled = [attrs for tag, attrs in page.elements if tag == "li" and attrs.get("class") == "sampled"]
    assert len(sampled) >= 12
    assert re.search(r"assistant · turn 1 .{1,40} tokens? · mean log-prob -0\.\d\d · version \d+", page.text)


def test_the_configuration_is_at_the_bottom(page: Page):
    assert page.text.index("groups_per_batch: 4") > page.text.index("Samples")


def test_nothing_is_loaded_from_elsewhere(page: Page):
    for tag, attrs in page.elements:
        assert not {"src", "href", "action", "data"} & set(attrs), (tag, attrs)
        assert tag not in ("link", "iframe", "object", "base"), tag


def test_text_of_trajectories_cannot_become_markup(tmp_path: Path):
    page = Page(write_report(make_run(tmp_path, 3, texts={"user": EVIL, "assistant": EVIL})))
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert "img" not in [tag for tag, _ in page.elements]
    assert "<img src=x onerror=alert(2)>" in page.text
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)


def test_names_in_charts_cannot_become_markup(tmp_path: Path):
    make_run(tmp_path, 2)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("frozen-lake", "</script><b>lake"))
    page = Page(write_report(tmp_path))
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert page.specs()["rewards"]["data"][0]["name"] == "&lt;/script&gt;&lt;b&gt;lake"


@pytest.mark.parametrize(
    ("state", "steps", "words"),
    [
        ("interrupted", 5, "This run was stopped early"),
        ("running", 1, "still goes on, or was killed"),
        ("failed", 0, "No training step was finished"),
    ],
)
def test_a_partial_run_has_a_report_that_says_so(tmp_path: Path, state: str, steps: int, words: str):
    page = Page(write_report(make_run(tmp_path, steps, state=state)))
    assert words in page.text
    assert ("rewards" in page.charts()) == (steps > 0)


def test_a_failed_run_names_the_rank_that_failed(tmp_path: Path):
    failure = {"component": "generate", "rank": 2, "host": "node-7", "error": "OSError: <no> space"}
    page = Page(write_report(make_run(tmp_path, 2, state="running", failure=failure)))
    assert "generate rank 2 on node-7: OSError: <no> space" in page.text


def test_an_empty_directory_has_a_report_that_says_so(tmp_path: Path):
    page = Page(write_report(tmp_path))
    assert "Nothing was trained on yet." in page.text
    assert page.charts() == set()


def test_a_run_of_a_few_steps_is_too_short_to_judge(tmp_path: Path):
    make_run(tmp_path, 4)
    assert {verdict.word for verdict in summarise(open_run_dir(tmp_path)).verdicts} == {"too short to say"}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.0123, "12 ms"),
        (0.25, "250 ms"),
        (41.26, "41.3 s"),
        (59.99, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (float("nan"), "–"),
    ],
)
def test_durations_read_well(seconds: float, words: str):
    assert duration(seconds) == words


@pytest.mark.parametrize(("value", "words"), [(950, "950"), (12345, "12.3 k"), (4.56e6, "4.56 M"), (0, "0")])
def test_quantities_read_well(value: float, words: str):
    assert quantity(value) == words
