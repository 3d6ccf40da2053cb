"""Curves and points on two axes, as SVG and HTML that stretch with the page; the page's script only reads values off.

The drawing area is stretched to the room there is, so lines keep their width and letters their size from a phone to a wide
screen and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from ahp.report.html_parts import data, legend

Words = Callable[[float], str]

MOST_POINTS = 1_500
"""[Empirical] Most points of a curve: more than a screen has columns for."""
ROOM, TICKS = 0.05, 5
"""Share of an axis that stays free beyond its values, and how many numbers are written beside it."""
SIDE = 1000
"""Side of the square that curves are drawn in before it is stretched."""


@dataclass(frozen=True)
class Curve:
    """Points in the order of ``x``; ``style`` names a color of page.css, and ``faint``, ``dashed`` or ``dots`` with it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str


@dataclass(frozen=True)
class Level:
    """A line across the chart at one height, and what it is."""

    y: float
    words: str
    style: str = "level"


@dataclass(frozen=True)
class Axis:
    """What an axis shows, its two ends, and how its numbers are written."""

    title: str
    low: float
    high: float
    words: Words

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the lower end and 1 at the upper."""
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        return nice_ticks(self.low, self.high)


def axis(title: str, values: Iterable[float], words: Words, *, from_zero: bool = False) -> Axis:
    """An axis that holds all values, with some room beyond them."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    if from_zero:
        low = min(0.0, low)
    wide = high - low or abs(high) or 1.0
    return Axis(title, low if from_zero and low == 0 else low - ROOM * wide, high + ROOM * wide, words)


def nice_ticks(low: float, high: float) -> list[float]:
    """About ``TICKS`` round numbers between two ends."""
    rough = (high - low) / TICKS
    if not (math.isfinite(rough) and rough > 0):
        return [low]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def number_words(value: float) -> str:
    """A number on an axis in few letters: ``12 k``, ``0.05``, ``3e-05``."""
    if value and not 1e-3 <= abs(value) < 1e4:
        return (
            f"{value / 1e3:g} k"
            if 1e4 <= abs(value) < 1e6
            else f"{value / 1e6:g} M"
            if 1e6 <= abs(value) < 1e9
            else f"{value:.3g}"
        )
    return f"{value:.4g}"


@dataclass(frozen=True)
class Chart:
    """Curves over one axis of steps."""

    curves: Sequence[Curve]
    x: Axis
    y: Axis
    levels: Sequence[Level] = ()
    band: tuple[float, float, str] | None = None
    """Lower end, upper end, and what it is."""
    marks: Sequence[tuple[float, str]] = field(default=())
    """Where on the x axis something happened, and what."""

    def html(self) -> str:
        drawn = [thinned(curve) for curve in self.curves]
        inside = [self._band(), *(self._curve(curve) for curve in drawn)]
        inside += [_line(0, self.y.share(one.y), 1, self.y.share(one.y), one.style) for one in self.levels]
        inside += [_line(self.x.share(at), 0, self.x.share(at), 1, "mark") for at, _ in self.marks]
        over = "".join(
            f"<span class='marked' style='left:{100 * self.x.share(at):.2f}%' title='{escape(words, quote=True)}'></span>"
            for at, words in self.marks
        )
        keys = [(curve.style, curve.name) for curve in self.curves]
        keys += [("band", self.band[2])] if self.band else []
        keys += [(one.style, one.words) for one in self.levels]
        keys += [("mark", "the workers were started again")] if self.marks else []
        values = {"x": self.x.title, "low": self.x.low, "high": self.x.high,
                  "curves": [[one.name, _rounded(one.x), _rounded(one.y)] for one in drawn]}  # fmt: skip
        drawing = legend(keys) + frame(self.x, self.y, "".join(inside), over)
        return f"<figure class='chart'>{drawing}<output></output>{data(values)}</figure>"

    def _band(self) -> str:
        if self.band is None:
            return ""
        low, high = self.y.share(self.band[0]), self.y.share(self.band[1])
        return f"<rect class='band' x='0' width='{SIDE}' y='{_down(high):.1f}' height='{SIDE * (high - low):.1f}'/>"

    def _curve(self, curve: Curve) -> str:
        points = [(SIDE * self.x.share(x), _down(self.y.share(y))) for x, y in zip(curve.x, curve.y, strict=True)]
        # A single point has no length, but a line with round ends still shows it.
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (points if len(points) != 1 else points * 2))
        return f"<polyline class='{curve.style}' points='{path}'/>"


def frame(x: Axis, y: Axis, svg: str, over: str = "") -> str:
    """Two axes with a grid; ``svg`` is drawn in the square ``SIDE`` x ``SIDE`` that is stretched, ``over`` is HTML above it."""
    grid = "".join(_line(0, y.share(at), 1, y.share(at), "grid") for at in y.ticks)
    beside = "".join(f"<span style='bottom:{100 * y.share(at):.2f}%'>{escape(y.words(at))}</span>" for at in y.ticks)
    below = "".join(f"<span style='left:{100 * x.share(at):.2f}%'>{escape(x.words(at))}</span>" for at in x.ticks)
    area = f"<svg viewBox='0 0 {SIDE} {SIDE}' preserveAspectRatio='none' aria-hidden='true'>{grid}{svg}</svg>"
    return (
        f"<div class='axis-title'>{escape(y.title)}</div><div class='plot'><div class='y'>{beside}</div>"
        f"<div class='area'>{area}{over}</div><div class='x'>{below}</div></div>"
        f"<div class='axis-title below'>{escape(x.title)}</div>"
    )


def thinned(curve: Curve) -> Curve:
    """A curve reduced to the lowest and the highest point of each stretch, if it has more points than a screen shows."""
    count = len(curve.x)
    if count <= MOST_POINTS:
        return curve
    kept: list[int] = [0]
    stretches = MOST_POINTS // 2 - 1
    for number in range(stretches):
        part = range(1 + number * (count - 2) // stretches, 1 + (number + 1) * (count - 2) // stretches)
        kept += sorted({min(part, key=curve.y.__getitem__), max(part, key=curve.y.__getitem__)})
    kept.append(count - 1)
    return Curve(curve.name, [curve.x[at] for at in kept], [curve.y[at] for at in kept], curve.style)


def _line(x0: float, y0: float, x1: float, y1: float, style: str) -> str:
    ends = f"x1='{SIDE * x0:.1f}' y1='{_down(y0):.1f}' x2='{SIDE * x1:.1f}' y2='{_down(y1):.1f}'"
    return f"<line class='{style}' {ends}/>"


def _down(share: float) -> float:
    """SVG counts from the top."""
    return SIDE * (1 - share)


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") if isinstance(value, float) else value for value in values]
