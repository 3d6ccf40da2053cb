"""The steps of one run, or of several side by side: one chart for each quantity of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ahp.plan import Forecast
from ahp.report.charts import Axis, Chart, Curve, Level, Words, axis, number_words
from ahp.words import percent, seconds

SMOOTHING_SHARE = 1 / 50
"""[Empirical] Half-life of the smoothed loss as a share of all steps: hides differences between batches, keeps the trend."""
COLOURS = 8
"""Colors ``c0`` to ``c7`` of page.css; further runs start again at the first."""

EVALUATION = "evaluation"
"""Key of metrics.jsonl, alone or with ``_NAME``, for what the user's function returned."""

Metrics = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Measured:
    """The steps of a run, and what they were forecast to take."""

    name: str
    metrics: Metrics
    forecast: Forecast | None
    tokens_per_step: int
    restarts: tuple[tuple[int, str], ...] = ()
    """Steps that were done when workers were started again, and what happened."""
    vocabulary: int | None = None


@dataclass(frozen=True)
class Quantity:
    """A chart: its title, the title of its axis, and its key in a step's metrics."""

    title: str
    axis: str
    key: str
    words: Words = number_words
    from_zero: bool = False
    predicted: Callable[[Measured], float | None] = lambda run: None


QUANTITIES = (
    Quantity("Loss", "loss (nats per token)", "loss"),
    Quantity("Gradient norm before clipping", "gradient norm", "grad_norm", from_zero=True),
    Quantity("Learning rate", "learning rate", "learning_rate", from_zero=True),
    Quantity(
        "Step time, measured against predicted", "step time", "step_time_s", seconds, from_zero=True,
        predicted=lambda run: run.forecast.step_time_s if run.forecast else None,
    ),
    Quantity(
        "Throughput", "tokens per second, all devices", "tokens_per_s", from_zero=True,
        predicted=lambda run: run.tokens_per_step / run.forecast.step_time_s if run.forecast else None,
    ),
    Quantity(
        "MFU, measured against predicted", "MFU", "mfu", percent, from_zero=True,
        predicted=lambda run: run.forecast.mfu if run.forecast else None,
    ),
)  # fmt: skip


def charts(runs: Sequence[Measured]) -> list[tuple[str, str]]:
    """(title, chart) of each quantity that some run has written down."""
    found = []
    for quantity in (*QUANTITIES, *_evaluations(runs)):
        curves = [curve for number, run in enumerate(runs) for curve in _curves(run, quantity, number, len(runs))]
        if curves:
            found.append((quantity.title, _chart(quantity, runs, curves).html()))
    return found


def _evaluations(runs: Sequence[Measured]) -> list[Quantity]:
    """A chart for each number that the user's function returned (``run.evaluation``), in the order in which they came."""
    keys = dict.fromkeys(key for run in runs for m in run.metrics for key, value in m.items() if _is_result(key, value))
    return [Quantity(f"Evaluation: {key.removeprefix(EVALUATION).lstrip('_') or 'result'}", key, key) for key in keys]


def _is_result(key: str, value: Any) -> bool:
    mine = key == EVALUATION or key.startswith(f"{EVALUATION}_")
    return mine and key != f"{EVALUATION}_time_s" and isinstance(value, (int, float))


def _curves(run: Measured, quantity: Quantity, number: int, of: int) -> list[Curve]:
    known = [m for m in run.metrics if m.get(quantity.key) is not None]  # none if run.on_nan left a step out
    if not known:
        return []
    steps, values = [m["step"] for m in known], [float(m[quantity.key]) for m in known]
    colour = f"c{number % COLOURS}"
    if quantity.key != "loss":
        return [Curve(run.name if of > 1 else "measured", steps, values, colour)]
    drawn = [
        Curve(f"{run.name}, each step" if of > 1 else "each step", steps, values, f"{colour} faint"),
        Curve(f"{run.name}, smoothed" if of > 1 else "smoothed", steps, smooth(values), colour),
    ]
    held_out = [m for m in run.metrics if m.get("validation_loss") is not None]
    if held_out:
        name = f"{run.name}, held-out text" if of > 1 else "held-out text"
        style = f"{colour} dashed" if of > 1 else "c1"
        values = [float(m["validation_loss"]) for m in held_out]
        drawn.append(Curve(name, [m["step"] for m in held_out], values, style))
    return drawn


def _chart(quantity: Quantity, runs: Sequence[Measured], curves: list[Curve]) -> Chart:
    levels, band, values = [], None, [y for curve in curves for y in curve.y]
    for number, run in enumerate(runs):
        predicted = quantity.predicted(run)
        if predicted is None:
            continue
        name, style = (
            ("predicted", "level") if len(runs) == 1 else (f"{run.name}, predicted", f"c{number % COLOURS} dashed")
        )
        levels.append(Level(predicted, f"{name} {quantity.words(predicted)}", style))
        values.append(predicted)
        if quantity.key == "step_time_s" and len(runs) == 1 and run.forecast is not None:
            band = run.forecast.step_time_low_s, run.forecast.step_time_high_s, "its 90 % band"
            values += band[:2]
    if quantity.key == "loss" and len(runs) == 1 and runs[0].vocabulary:
        nothing = math.log(runs[0].vocabulary)
        levels.append(Level(nothing, f"ln({runs[0].vocabulary}): no knowledge", "level nothing"))
        values.append(nothing)
    steps = [x for curve in curves for x in curve.x]
    across = Axis("step", min(steps), max(steps) if max(steps) > min(steps) else min(steps) + 1, number_words)
    marks = [(at, why) for at, why in runs[0].restarts if across.low <= at <= across.high] if len(runs) == 1 else []
    return Chart(
        curves, across, axis(quantity.axis, values, quantity.words, from_zero=quantity.from_zero), levels, band, marks
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean with the bias of the beginning divided out."""
    decay = 0.5 ** (1 / max(1.0, SMOOTHING_SHARE * len(values)))
    total = weight = 0.0
    smoothed = []
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smoothed.append(total / weight)
    return smoothed
