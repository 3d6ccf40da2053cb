"""The pictures of the report page, drawn by plotly (extra [report])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ahp.about import install_extra
from ahp.errors import AhpError
from ahp.plan import Forecast
from ahp.words import GIB, part_words, seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ahp.schedule.simulate import Timeline

MEASURED, PREDICTED, LIMIT, GRID = "#2457c5", "#c2570c", "#b3261e", "#e6e8ec"
PARTS = ("#2457c5", "#0e8a7d", "#c2570c", "#7a4fc4", "#5a6b7f", "#b0831b", "#b03a75", "#3f8f3f", "#8aa0bf", "#8d6e63")
"""Told apart on white and in grey print; a tenth part begins again at the first."""
ACTIONS = {"F": "#2457c5", "B": "#0e8a7d", "I": "#0e8a7d", "W": "#7fc4bb"}
"""Forward, backward, input gradient, weight gradient; anything else is communication or the optimizer."""
OTHER_ACTION = "#c2570c"
INSIDE_ITS_ACTION = ("forward", "backward", "input gradient", "weight gradient")
"""Parts of an action that its own bar shows already: what is drawn inside it is what keeps it from computing."""
ON_THE_WAY = "pipeline sends"
"""Thread of what a rank does not wait for: it would lie across the bars of the actions."""
SMOOTHING_SHARE = 1 / 50
"""[Empirical] Half life of the smoothed loss, of the steps there are: hides what differs between batches, keeps the
trend."""
NEAR_LIMIT = 0.3
"""[Empirical] A bar that fills less than this share of its scale cannot be read."""
MOST_EVENTS = 20_000
"""[Empirical] Bars that a browser still draws at once; a longer timeline is cut at the end."""


class NoPlotly(AhpError):
    """The page needs an extra that is not installed."""


def script() -> str:
    """Plotly's own JavaScript, so that the page needs no network. Raises NoPlotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise NoPlotly(f"plotly is not installed; {install_extra('report')}") from None
    return get_plotlyjs()


def loss(metrics: Sequence[Mapping[str, Any]], vocab_size: int | None) -> Figure:
    """Loss of every step, and smoothed; the height of a model that knows nothing, ln(vocabulary), as a line."""
    import math

    import plotly.graph_objects as go

    known = [m for m in metrics if m["loss"] is not None]  # none where run.on_nan left a step out
    steps = [m["step"] for m in known]
    values = [m["loss"] for m in known]
    figure = go.Figure(layout=_layout("step", "loss (nats per token)"))
    figure.add_scatter(x=steps, y=values, name="each step", mode="lines", line={"color": "#a9bfe8", "width": 1.2})
    figure.add_scatter(
        x=steps, y=_smooth(values), name="smoothed", mode="lines", line={"color": MEASURED, "width": 2.4}
    )
    held_out = [m for m in metrics if m.get("validation_loss") is not None]
    if held_out:
        figure.add_scatter(
            x=[m["step"] for m in held_out],
            y=[m["validation_loss"] for m in held_out],
            name="held-out text",
            mode="lines+markers",
            line={"color": PREDICTED},
        )
    if vocab_size:
        figure.add_hline(
            y=math.log(vocab_size),
            line={"color": GRID, "dash": "dot"},
            annotation_text=f"ln({vocab_size}): no knowledge",
        )
    return figure


def step_time(metrics: Sequence[Mapping[str, Any]], forecast: Forecast | None) -> Figure:
    """Measured time of every step against the forecast and its band."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=_layout("step", "step time (s)"))
    if forecast is not None:
        low, high = forecast.step_time_low_s, forecast.step_time_high_s
        figure.add_hrect(y0=low, y1=high, fillcolor=PREDICTED, opacity=0.12, line_width=0)
        figure.add_hline(y=forecast.step_time_s, line={"color": PREDICTED, "dash": "dash", "width": 2})
        figure.add_scatter(
            x=[None],
            y=[None],
            name="predicted, 90 % band shaded",
            mode="lines",
            line={"color": PREDICTED, "dash": "dash", "width": 2},
        )
    figure.add_scatter(
        x=[m["step"] for m in metrics],
        y=[m["step_time_s"] for m in metrics],
        name="measured",
        mode="lines",
        line={"color": MEASURED, "width": 1.6},
    )
    figure.update_yaxes(rangemode="tozero")
    return figure


def shares(parts: Mapping[str, float], unit: str, scale: float, limit: float | None = None) -> Figure:
    """One bar, cut into its parts; parts of nothing are left out.

    ``limit``, in the parts' own unit, is drawn as a line where the bar comes near it, else it is said at the axis.
    """
    import plotly.graph_objects as go

    near = limit is not None and sum(parts.values()) > NEAR_LIMIT * limit
    title = unit if limit is None or near else f"{unit} (a device has {limit / scale:.1f})"
    figure = go.Figure(layout=_layout(title, "", height=190))
    for number, (name, value) in enumerate((n, v) for n, v in parts.items() if v > 0):
        figure.add_bar(
            x=[value / scale],
            y=[""],
            name=part_words(name),
            orientation="h",
            marker={"color": PARTS[number % len(PARTS)]},
            hovertemplate=f"{part_words(name)}: %{{x:.4g}} {unit}<extra></extra>",
        )
    if limit is not None and near:
        figure.add_vline(
            x=limit / scale,
            line={"color": LIMIT, "dash": "dash"},
            annotation_text="device memory",
            annotation_position="top left",
        )
        figure.update_xaxes(range=[0, 1.08 * max(limit, sum(parts.values())) / scale])
    figure.update_layout(barmode="stack", bargap=0.5)
    return figure


def memory(forecast: Forecast, limit_bytes: float | None) -> Figure:
    """Bytes of the fullest rank by part, against the device's memory."""
    return shares(forecast.memory, "GiB", GIB, limit_bytes)


def step_parts(forecast: Forecast) -> Figure:
    """Time of the slowest rank by part."""
    return shares(forecast.step, "s", 1.0)


def timeline(events: Sequence[Mapping[str, Any]]) -> Figure:
    """A Chrome trace's complete events, one row per rank; what lies inside another event is drawn thinner.

    A row is a process that the trace names, with all its threads, else a thread. ``ts`` and ``dur`` are microseconds, as
    the format has it.
    """
    import plotly.graph_objects as go

    processes, threads = _names(events, "process_name"), _names(events, "thread_name")
    drawn = (
        e
        for e in events
        if e.get("ph") == "X"
        and e["dur"] > 0
        and e["name"] not in INSIDE_ITS_ACTION
        and threads.get((e["pid"], e["tid"])) != ON_THE_WAY
    )
    bars = sorted(drawn, key=lambda e: (e["ts"], -e["dur"]))[:MOST_EVENTS]
    places = [(e["pid"],) if (e["pid"],) in processes else (e["pid"], e["tid"]) for e in bars]
    rows, told = sorted(set(places)), processes | threads
    names = {row: told.get(row, f"rank {row[0]}" if row[-1] == row[0] else "/".join(map(str, row))) for row in rows}
    figure = go.Figure(layout=_layout("time in the step (ms)", "", height=120 + 46 * len(rows)))
    figure.add_bar(
        base=[e["ts"] / 1e3 for e in bars],
        x=[e["dur"] / 1e3 for e in bars],
        y=[names[place] for place in places],
        orientation="h",
        width=[0.8 / (1 + 0.6 * depth) for depth in _depths(bars, places)],
        marker={"color": [_action_color(str(e["name"])) for e in bars], "line": {"color": "white", "width": 0.6}},
        text=[str(e["name"]) for e in bars],
        textposition="inside",
        insidetextanchor="middle",
        constraintext="inside",
        hovertemplate="%{text}: %{x:.4g} ms from %{base:.4g} ms<extra>%{y}</extra>",
        showlegend=False,
    )
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(categoryorder="array", categoryarray=[names[row] for row in reversed(rows)], showgrid=False)
    return figure


def schedules(timelines: Mapping[str, Timeline]) -> Figure:
    """What each pipeline rank does when under several schedules, one under the other; what is white is bubble."""
    from plotly.subplots import make_subplots

    names = [f"{name}: {seconds(timeline.makespan_s)}" for name, timeline in timelines.items()]
    figure = make_subplots(rows=len(names), cols=1, shared_xaxes=True, vertical_spacing=0.08, subplot_titles=names)
    ranks = 0
    for row, timeline in enumerate(timelines.values(), 1):
        spans = [(rank, span) for rank, own in enumerate(timeline.ranks) for span in own][:MOST_EVENTS]
        ranks += len(timeline.ranks)
        figure.add_bar(
            base=[1e3 * span.start_s for _, span in spans],
            x=[1e3 * (span.end_s - span.start_s) for _, span in spans],
            y=[f"rank {rank}" for rank, _ in spans],
            orientation="h",
            marker={
                "color": [ACTIONS[span.action.kind] for _, span in spans],
                "line": {"color": "white", "width": 0.6},
            },
            text=[str(span.action) for _, span in spans],
            textposition="inside",
            constraintext="inside",
            hovertemplate="%{text}: %{x:.4g} ms from %{base:.4g} ms<extra>%{y}</extra>",
            showlegend=False,
            row=row,
            col=1,
        )
    told = _layout("time in the step (ms)", "", height=140 + 30 * ranks)
    figure.update_layout(barmode="overlay", **{key: told[key] for key in ("template", "height", "margin", "font")})
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text=told["xaxis"]["title"], row=len(names), col=1)
    return figure


def html(figure: Figure) -> str:
    """The figure as a piece of a page that has plotly's script."""
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})


def _layout(x_title: str, y_title: str, height: int = 300) -> dict[str, Any]:
    axis = {
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": "#9aa3af",
        "ticks": "outside",
        "tickcolor": "#9aa3af",
    }
    return {
        "template": "plotly_white",
        "height": height,
        "margin": {"l": 64, "r": 20, "t": 24, "b": 48},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#28303b"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "xaxis": {**axis, "title": x_title},
        "yaxis": {**axis, "title": y_title},
    }


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean with the bias of the beginning divided out."""
    decay = 0.5 ** (1 / max(1.0, SMOOTHING_SHARE * len(values)))
    total = weight = 0.0
    smoothed = []
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smoothed.append(total / weight)
    return smoothed


def _names(events: Sequence[Mapping[str, Any]], what: str) -> dict[tuple[int, ...], str]:
    """What the trace calls its processes, by (pid,), or its threads, by (pid, tid); without what stands in brackets."""
    told = (e for e in events if e.get("ph") == "M" and e.get("name") == what)
    return {
        (e["pid"],) if what == "process_name" else (e["pid"], e["tid"]): str(e["args"]["name"]).partition(" (")[0]
        for e in told
    }


def _depths(bars: Sequence[Mapping[str, Any]], rows: Sequence[tuple[int, ...]]) -> list[int]:
    """How many events of its own row each event lies in; ``bars`` are in order of time, the longer first."""
    open_until: dict[tuple[int, ...], list[float]] = {}
    depths = []
    for bar, row in zip(bars, rows, strict=True):
        ends = open_until.setdefault(row, [])
        while ends and ends[-1] <= bar["ts"]:
            ends.pop()
        depths.append(len(ends))
        ends.append(bar["ts"] + bar["dur"])
    return depths


def _action_color(name: str) -> str:
    letters = name.lstrip("0123456789")
    is_action = letters[:1] in ACTIONS and letters[1:].strip("0123456789 ") == ""
    return ACTIONS[letters[0]] if is_action else OTHER_ACTION
