"""Writes ``report.html``: one file that opens anywhere, without a network, and tells how the run went."""

import json
import math
import os
from collections.abc import Iterator
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from hpc_rollart.analysis import figures
from hpc_rollart.analysis.figures import Figure
from hpc_rollart.analysis.overlap import Overlap, measure
from hpc_rollart.analysis.rundir import RunDir, open_run_dir
from hpc_rollart.analysis.samples import pick_samples
from hpc_rollart.analysis.summary import Summary, summarise

REPORT_FILE = "report.html"

BANNERS = {
    "failed": "This run failed. What follows is what it did before.",
    "interrupted": "This run was stopped early; it ended cleanly.",
    "running": "This run still goes on, or was killed; this is the state on disk.",
    "starting": "This run was starting when it was last heard of.",
    "stopping": "This run was stopping when it was last heard of.",
    "unknown": "This run never reported a state; this is what is on disk.",
}


def write_report(run_dir: Path) -> Path:
    """Write the report of the run in `run_dir`, whatever state it is in.

    Returns
    -------
    Path
        ``run_dir/report.html``, replaced whole.

    Raises
    ------
    StoreError
        `run_dir` is not a directory.
    """
    run = open_run_dir(run_dir)
    summary = summarise(run)
    overlap = measure(run.timelines)
    charts = list(_charts(run, summary))
    samples = pick_samples(run)
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            summary=summary,
            overlap=overlap,
            banner=BANNERS.get(run.state),
            tiles=_tiles(run, summary, overlap),
            charts={chart.id: chart for chart in charts},
            small=[chart for chart in charts if chart.id.startswith("small-")],
            specs=_script_json({chart.id: chart.spec for chart in charts}),
            plotly=(files("plotly") / "package_data" / "plotly.min.js").read_text(),
            samples={task: list(group) for task, group in groupby(samples, key=lambda sample: sample.task)},
        )
    )
    path = run.path / REPORT_FILE
    aside = path.with_name(f".{REPORT_FILE}.{os.getpid()}")
    aside.write_text(page, encoding="utf-8", errors="backslashreplace")
    os.replace(aside, path)
    return path


def _charts(run: RunDir, summary: Summary) -> Iterator[Figure]:
    made = [
        figures.rewards(run),
        *figures.training(run),
        figures.staleness(run, summary),
        figures.throughput(run),
        figures.step_times(run),
        figures.role_times(run),
        figures.strip(run),
    ]
    return (chart for chart in made if chart is not None)


def _tiles(run: RunDir, summary: Summary, overlap: Overlap) -> list[tuple[str, str, str]]:
    """The headline numbers: name, value, remark."""
    planned = f"of {summary.steps_planned}" if summary.steps_planned else ""
    if len(run.attempts) > 1:
        planned = f"{planned} in {len(run.attempts)} attempts".strip()
    lag = "–" if summary.max_staleness is None else str(summary.max_staleness)
    bound = "" if run.alpha is None else f"bound {run.alpha}"
    rate = summary.trained_tokens / summary.wall_s if summary.wall_s > 0 else math.nan
    hidden = f"{overlap.fraction:.0%}" if overlap.generate_s else "–"
    stood = f"generators stood still {overlap.exposed_s:.2g} s for weights" if overlap.generate_s else ""
    return [
        ("Steps", f"{summary.steps:,}", planned),
        ("Wall time", duration(summary.wall_s), ""),
        ("Trajectories", f"{summary.trajectories:,}", f"{summary.trained:,} trained on"),
        ("Tokens", quantity(summary.tokens), f"{quantity(summary.trained_tokens)} trained on"),
        ("Trained tokens/s", quantity(rate), "over the whole run"),
        ("Largest staleness", lag, bound),
        ("Generation hidden", hidden, stood or "under training or weight transfer"),
    ]


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def duration(seconds: float) -> str:
    """Seconds as people say them: ``12 ms``, ``41 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    if 0 < seconds < 0.9995:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.0995 else f"{seconds * 1e3:.0f} ms"
    if whole < 60:
        return f"{seconds:.3g} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def quantity(value: float) -> str:
    """A count in three significant digits: ``950``, ``12.3 k``, ``4.56 M``."""
    if not math.isfinite(value):
        return "–"
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def number(value: float | None, digits: int = 3) -> str:
    """A number or a dash."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hpc_rollart.analysis", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"duration": duration, "quantity": quantity, "number": number}
    return environment
