"""The layouts that a search priced, as a picture: step time with its band against the memory of the fullest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from ahp.plan import Plan
from ahp.report.charts import SIDE, Axis, axis, frame, number_words
from ahp.report.html_parts import Html, legend, table
from ahp.words import GIB, gib, seconds


@dataclass(frozen=True)
class Candidate:
    """A layout with what it would cost."""

    words: str
    step_time_s: float
    low_s: float
    high_s: float
    memory_bytes: int
    fits: bool
    reason: str
    kind: str = "other"
    """``best``: the plan itself. ``front``: nothing that fits is both faster and smaller. ``misfit``, ``other``."""
    is_today: bool = False


FAR = 1.25
"""[Empirical] Multiple of the largest memory: layouts that need more are drawn there, so that they do not press the others together."""
KINDS = {
    "best": "the plan",
    "front": "Pareto frontier: none that fits is both faster and smaller",
    "other": "fits, but a layout of the frontier is better",
    "misfit": "does not fit, or may not",
}


def candidates_of(plan: Plan) -> list[Candidate]:
    """The plan first, then the layouts that lost; those from older plans, which lack their memory, are left out."""
    forecast = plan.forecast
    if forecast is None:
        return []
    own = Candidate(
        plan.parallelism.short(), forecast.step_time_s, forecast.step_time_low_s, forecast.step_time_high_s,
        forecast.needed_bytes, forecast.fits, "chosen", "best",
    )  # fmt: skip
    today = plan.current.parallelism.short() if plan.current is not None else None
    others = [*plan.rejected]
    if plan.current is not None and today not in {own.words, *(one.parallelism.short() for one in others)}:
        others.append(plan.current)
    rows = [own]
    for one in others:
        if one.step_time_s is None or one.band_s is None or one.memory_bytes is None or one.fits is None:
            continue
        rows.append(
            Candidate(one.parallelism.short(), one.step_time_s, *one.band_s, one.memory_bytes, one.fits, one.reason)
        )
    return _judged(rows, today)


def _judged(rows: Sequence[Candidate], today: str | None) -> list[Candidate]:
    front, judged = _front(rows), []
    for one in rows:
        kind = "misfit" if not one.fits else "front" if one in front else "other"
        judged.append(replace(one, kind="best" if one.kind == "best" else kind, is_today=one.words == today))
    return judged


def _front(rows: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that fit and that no other that fits beats, the smallest first."""
    fitting = [one for one in rows if one.fits]
    front = [one for one in fitting if not any(_beats(other, one) for other in fitting)]
    return sorted(front, key=lambda one: one.memory_bytes)


def _beats(one: Candidate, other: Candidate) -> bool:
    no_worse = one.step_time_s <= other.step_time_s and one.memory_bytes <= other.memory_bytes
    return no_worse and (one.step_time_s, one.memory_bytes) != (other.step_time_s, other.memory_bytes)


def picture(rows: Sequence[Candidate], limits: Mapping[str, int]) -> str:
    """The picture and the table of its numbers. ``limits``: memory in bytes of each type of device."""
    x = _memory_axis(rows, [limit / GIB for limit in limits.values()])
    ends = [value for one in rows for value in (one.step_time_s, one.low_s, one.high_s)]
    y = axis("step time and its 90 % band", ends, seconds)
    over = "".join(_whisker(one, x, y) for one in rows)
    # The first are drawn last: if dots overlap, the better one is visible.
    over += "".join(_dot(number, one, x, y) for number, one in reversed([*enumerate(rows, 1)]))
    keys = [(kind, words) for kind, words in KINDS.items() if any(one.kind == kind for one in rows)]
    keys += [("today", "today's layout")] if any(one.is_today for one in rows) else []
    keys += [("level limit", f"{name} has {gib(limit)}") for name, limit in limits.items()]
    svg = _stairs(rows, x, y) + "".join(_limit(limit, x) for limit in limits.values())
    return f"<figure class='tall'>{legend([*keys, ('whisker', 'band')])}{frame(x, y, svg, over)}</figure>{_table(rows)}"


def _memory_axis(rows: Sequence[Candidate], limits_gib: Sequence[float]) -> Axis:
    """An axis from the smallest to somewhat more than what fits: layouts that are far too large are drawn at the edge."""
    needs = [one.memory_bytes / GIB for one in rows]
    fitting = [one.memory_bytes / GIB for one in rows if one.fits]
    most = FAR * max([*fitting, *limits_gib] or needs)
    return axis("memory of the fullest rank (GiB)", [*(min(need, most) for need in needs), *limits_gib], number_words)


def _whisker(one: Candidate, x: Axis, y: Axis) -> str:
    left, low, high = (100 * share for share in (_across(one, x), y.share(one.low_s), y.share(one.high_s)))
    return f"<i class='whisker' style='left:{left:.2f}%;bottom:{low:.2f}%;height:{high - low:.2f}%'></i>"


def _across(one: Candidate, x: Axis) -> float:
    return min(1.0, x.share(one.memory_bytes / GIB))


def _dot(number: int, one: Candidate, x: Axis, y: Axis) -> str:
    words = escape(f"{one.words}: {seconds(one.step_time_s)}, {gib(one.memory_bytes)}; {one.reason}", quote=True)
    far = "\N{RIGHTWARDS ARROW}" if one.memory_bytes / GIB > x.high else ""
    place = f"left:{100 * _across(one, x):.2f}%;bottom:{100 * y.share(one.step_time_s):.2f}%"
    today = " today" if one.is_today else ""
    return (
        f"<a class='dot {one.kind}{today}' href='#candidate-{number}' style='{place}' title='{words}'>{number}{far}</a>"
    )


def _stairs(rows: Sequence[Candidate], x: Axis, y: Axis) -> str:
    """A stair line through the candidates that no other beats."""
    points: list[tuple[float, float]] = []
    for one in _front(rows):
        at = SIDE * _across(one, x), SIDE * (1 - y.share(one.step_time_s))
        if points:
            points.append((at[0], points[-1][1]))
        points.append(at)
    path = " ".join(f"{left:.1f},{down:.1f}" for left, down in points)
    return f"<polyline class='front' points='{path}'/>" if len(points) > 1 else ""


def _limit(limit_bytes: int, x: Axis) -> str:
    at = SIDE * x.share(limit_bytes / GIB)
    return f"<line class='level limit' x1='{at:.1f}' x2='{at:.1f}' y1='0' y2='{SIDE}'/>"


def _table(rows: Sequence[Candidate]) -> str:
    cells = (
        (
            Html(f"<span id='candidate-{number}'>{number}</span>"),
            f"{one.words}{' (today)' if one.is_today else ''}",
            seconds(one.step_time_s),
            f"{seconds(one.low_s)} to {seconds(one.high_s)}",
            gib(one.memory_bytes),
            one.reason,
        )
        for number, one in enumerate(rows, 1)
    )
    head = ("", "layout", "step", "90 % band", "memory", "why not the first")
    return table(head, cells)
