"""The report's charts as plain Plotly specifications, themed in the browser.

A colour is a name such as ``$train``; the page's script replaces it by the palette of the light or the
dark theme, so the same specification serves both.
"""

import html
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_rollart.analysis.overlap import PRIORITY, attempts, time_by_category
from hpc_rollart.analysis.rundir import Rank, RunDir
from hpc_rollart.analysis.summary import Summary
from hpc_rollart.observe.trace import Event

MOST_BARS = 6000
WINDOW_STEPS = 4
# Charts stay light however long the run: beyond this many steps, lines are thinned.
MOST_POINTS = 2000

CATEGORY_NAMES = {
    "train": "train",
    "generate": "generate",
    "weights": "weights",
    "env": "environment",
    "store": "store",
    "wait": "wait",
    "idle": "idle",
}

SMALL_MULTIPLES = [
    ("loss", "Loss"),
    ("grad_norm", "Gradient norm"),
    ("entropy", "Entropy (nats)"),
    ("kl_behaviour", "KL to behaviour policy"),
    ("clip_fraction", "Clipped tokens"),
    ("correction_mean", "Mean importance weight"),
]

Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One chart: `spec` is ``{"data", "layout"}`` for Plotly; `wide` ones take a row of their own."""

    id: str
    title: str
    note: str
    spec: dict[str, Any]
    height: int = 320
    wide: bool = False


def label(text: str) -> str:
    """Text for Plotly, which takes some HTML for markup."""
    return html.escape(text, quote=False)


def smooth(values: list[float | None], span: float) -> list[float | None]:
    """Exponential moving average over about `span` points, without the bias of its start; gaps stay."""
    keep = 1 - 1 / max(span, 1.0)
    mean = weight = 0.0
    out: list[float | None] = []
    for value in values:
        if value is None:
            out.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out


def rewards(run: RunDir) -> Figure | None:
    """Mean reward a step of each task, raw and smoothed."""
    tasks = list(dict.fromkeys(task for line in run.metrics for task in line.get("reward", {})))
    steps = [line["step"] for line in run.metrics]
    data: list[Trace] = []
    for number, task in enumerate(tasks):
        raw = [line.get("reward", {}).get(task) for line in run.metrics]
        colour = f"$task{number % 6}"
        data.append(_line(steps, raw, label(task), colour, width=1, opacity=0.35, legend=False))
        data.append(_line(steps, smooth(raw, len(steps) / 12), label(task), colour, width=3))
    if not data:
        return None
    layout = _by_step(steps, "mean reward", legend=len(tasks) > 1)
    note = "Thin: mean over the step's trajectories. Thick: exponential moving average."
    return Figure("rewards", "Reward", note, {"data": data, "layout": layout}, 380, wide=True)


def training(run: RunDir) -> list[Figure]:
    """Small multiples of the trainer's own numbers; those that the run did not log are left out."""
    found = []
    steps = [line["step"] for line in run.metrics]
    for key, title in SMALL_MULTIPLES:
        values = [line.get(key) for line in run.metrics]
        if all(value is None for value in values):
            continue
        data = [
            _line(steps, values, title, "$line", width=1, opacity=0.4, legend=False),
            _line(steps, smooth(values, len(steps) / 12), title, "$line", width=2.5, legend=False),
        ]
        layout = _by_step(steps, "")
        if not any(values):
            layout["yaxis"] |= {"range": [0, 1]}  # Plotly would centre a line of zeros between -1 and 1
        found.append(Figure(f"small-{key}", title, "", {"data": data, "layout": layout}, 220))
    return found


def staleness(run: RunDir, summary: Summary) -> Figure | None:
    """How many versions behind the consumed trajectories had started."""
    if not summary.staleness:
        return None
    total = sum(summary.staleness.values())
    lags = range(max(max(summary.staleness), run.alpha or 0) + 1)
    counts = [summary.staleness.get(lag, 0) for lag in lags]
    bars = {
        "type": "bar",
        "x": list(lags),
        "y": counts,
        "marker": {"color": "$generate"},
        "text": [f"{count / total:.0%}" for count in counts],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "staleness %{x}: %{y} trajectories<extra></extra>",
    }
    layout = _layout("weight versions behind", "trajectories", legend=False)
    layout["xaxis"] |= {"dtick": 1, "range": [-0.6, len(lags) - 0.4 + 0.2]}
    note = "Weight version trained from, less the version that sampled the first token."
    if run.alpha is not None:
        edge = run.alpha + 0.5
        layout["shapes"] = [
            {"type": "line", "x0": edge, "x1": edge, "y0": 0, "y1": 1, "yref": "paper"}
            | {"line": {"color": "$train", "width": 2, "dash": "dot"}}
        ]
        layout["annotations"] = [
            {"x": edge, "y": 1, "yref": "paper", "text": f"bound {run.alpha}", "showarrow": False}
            | {"xanchor": "right", "yanchor": "bottom", "font": {"color": "$train"}}
        ]
    return Figure("staleness", "Staleness", note, {"data": [bars], "layout": layout})


def throughput(run: RunDir) -> Figure | None:
    """Sampled tokens a second, step by step."""
    values = [line.get("tokens_per_s") for line in run.metrics]
    if all(value is None for value in values):
        return None
    steps = [line["step"] for line in run.metrics]
    data = [
        _line(steps, values, "tokens/s", "$generate", width=1, opacity=0.4, legend=False),
        _line(steps, smooth(values, len(steps) / 12), "tokens/s", "$generate", width=2.5, legend=False),
    ]
    layout = _by_step(steps, "sampled tokens/s")
    layout["yaxis"]["rangemode"] = "tozero"
    return Figure("throughput", "Throughput", "Tokens sampled by all generators.", _spec(data, layout))


def step_times(run: RunDir) -> Figure | None:
    """What the trainer spent each step on."""
    parts = [
        ("wait_batch_s", "waiting for the batch", "$line"),
        ("train_s", "training", "$train"),
        ("publish_s", "publishing (mostly in the background)", "$weights"),
    ]
    steps = [line["step"] for line in run.metrics]
    data = []
    for key, name, colour in parts:
        values = [line.get(key) for line in run.metrics]
        if any(value is not None for value in values):
            data.append(_line(steps, smooth(values, len(steps) / 30), name, colour, width=2))
    if not data:
        return None
    layout = _by_step(steps, "seconds", legend=True)
    layout["yaxis"]["rangemode"] = "tozero"
    return Figure("step-times", "The trainer's step", "Smoothed.", _spec(data, layout))


def role_times(run: RunDir) -> Figure | None:
    """Where the time of each rank went, as shares of the run."""
    times = time_by_category(_active(run))
    if not times:
        return None
    names = [_rank_name(rank) for rank in times]
    totals = [sum(parts.values()) for parts in times.values()]
    data = []
    for category in (*PRIORITY, "idle"):
        spent = [parts[category] for parts in times.values()]
        if not any(spent):
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": CATEGORY_NAMES[category],
                "y": names,
                "x": [round(part / total, 4) for part, total in zip(spent, totals, strict=True)],
                "customdata": [round(part, 1) for part in spent],
                "marker": {"color": f"${category}"},
                "hovertemplate": "%{y}: "
                + CATEGORY_NAMES[category]
                + " %{x:.1%}, %{customdata} s<extra></extra>",
            }
        )
    layout = _layout("", "", legend=True)
    layout |= {"barmode": "stack", "bargap": 0.3}
    layout["legend"]["traceorder"] = "normal"
    layout["xaxis"] |= {"tickformat": ".0%", "range": [0, 1.005], "dtick": 0.25, "ticklabeloverflow": "allow"}
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True, "showgrid": False}
    note = (
        "Share of the run. What a rank does at once counts as the first of: train, generate, weights, env. "
        "The coordinator only passes messages and is left out."
    )
    height = 120 + 34 * len(names)
    return Figure("role-times", "Where each rank's time went", note, _spec(data, layout), height, wide=True)


def strip(run: RunDir) -> Figure | None:
    """A few seconds of the run, every rank a row, for the eye to see what overlaps."""
    timelines = _active(run)
    if not timelines:
        return None
    start, end = _window(run)
    rows = {rank: _rank_name(rank) for rank in timelines}
    data = []
    for category in reversed(PRIORITY):
        spans = [
            (rows[rank], event)
            for rank, events in timelines.items()
            for event in events
            if event.cat == category and event.end >= start and event.t <= end
        ][: MOST_BARS // len(PRIORITY)]
        if not spans:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": CATEGORY_NAMES[category],
                "y": [row for row, _ in spans],
                "base": [round(max(event.t, start) - start, 4) for _, event in spans],
                "x": [round(min(event.end, end) - max(event.t, start), 4) for _, event in spans],
                "text": [label(f"{event.name}: {event.d * 1e3:.1f} ms") for _, event in spans],
                "textposition": "none",
                "marker": {"color": f"${category}", "line": {"width": 0}},
                "width": 0.34 if category == "weights" else 0.78,
                "hovertemplate": "%{text}<extra>%{y}</extra>",
            }
        )
    layout = _layout("seconds", "", legend=True)
    layout |= {"barmode": "overlay"}
    layout["legend"]["traceorder"] = "reversed"
    layout["xaxis"] |= {"range": [0, round(end - start, 3)]}
    layout["yaxis"] |= {
        "categoryorder": "array",
        "categoryarray": list(rows.values()),
        "autorange": "reversed",
        "automargin": True,
        "showgrid": False,
    }
    note = (
        "A row a rank; thin bars: weights on their way. The whole run: hpc-rollart timeline, then Perfetto."
    )
    height = 130 + 38 * len(rows)
    return Figure("strip", "A stretch of the run", note, _spec(data, layout), height, wide=True)


def _active(run: RunDir) -> dict[Rank, list[Event]]:
    """Timelines of the ranks that did something; the coordinator's only marks the attempts."""
    return {rank: events for rank, events in run.timelines.items() if any(event.d for event in events)}


def _window(run: RunDir) -> tuple[float, float]:
    """A window of a few training steps from the middle of the attempt that did most of them."""
    events = [event for found in run.timelines.values() for event in found]
    trained, (first, last) = max(
        (
            (sorted(event.t for event in events if event.name == "train" and a <= event.t <= b), (a, b))
            for a, b in attempts(run.timelines)
        ),
        key=lambda found: len(found[0]),
    )
    if len(trained) <= WINDOW_STEPS:
        return first, min(last, first + 60.0)
    middle = (len(trained) - WINDOW_STEPS) * 2 // 3
    start, end = trained[middle], trained[middle + WINDOW_STEPS]
    margin = 0.08 * (end - start)
    return start - margin, end + margin


def _rank_name(rank: Rank) -> str:
    return label(f"{rank[0]} {rank[1]}")


def _spec(data: list[Trace], layout: dict[str, Any]) -> dict[str, Any]:
    return {"data": data, "layout": layout}


def _line(
    x: list[int],
    y: list[float | None],
    name: str,
    colour: str,
    *,
    width: float,
    opacity: float = 1.0,
    legend: bool = True,
) -> Trace:
    keep = (
        np.unique(np.linspace(0, len(x) - 1, MOST_POINTS).astype(int))
        if len(x) > MOST_POINTS
        else range(len(x))
    )
    values = [y[at] for at in keep]
    return {
        "type": "scatter",
        # A line through a single point would be invisible.
        "mode": "lines" if len(x) > 1 else "markers",
        "x": [x[at] for at in keep],
        "y": [None if value is None else float(f"{value:.6g}") for value in values],
        "name": name,
        "opacity": opacity,
        "line": {"color": colour, "width": width},
        "marker": {"color": colour},
        "showlegend": legend,
        "hoverinfo": "skip" if opacity < 1 else "x+y+name",
    }


def _layout(x: str, y: str, *, legend: bool) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}, "zeroline": False},
        "yaxis": {"title": {"text": y}, "zeroline": False},
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }


def _by_step(steps: list[int], y: str, *, legend: bool = False) -> dict[str, Any]:
    layout = _layout("step", y, legend=legend)
    if len(steps) <= 12:
        layout["xaxis"]["dtick"] = 1  # a short run has no step 1.5
    return layout
