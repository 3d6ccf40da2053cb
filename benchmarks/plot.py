"""A plot as SVG, drawn without a library: lines over two logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48
"""Margins in pixels."""
COLOURS = ("#1f6feb", "#d1570c", "#1a7f37")


@dataclass(frozen=True)
class Line:
    """One series, its points from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis between two pixels."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def decades(self) -> list[float]:
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]


def log_plot(lines: Sequence[Line], x_title: str, y_title: str) -> str:
    """The picture as text; every coordinate must be positive."""
    x = Axis(*_decades([px for line in lines for px, _ in line.points]), LEFT, WIDTH - RIGHT)
    y = Axis(*_decades([py for line in lines for _, py in line.points]), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_grid(x, y),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{x_title}</text>',
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{y_title}</text>',
    ]
    for number, line in enumerate(lines):
        parts += _line(line, COLOURS[number % len(COLOURS)], number, x, y)
    return "\n".join([*parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around all values."""
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)) + 1e-9)


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for value in x.decades():
        parts.append(f'<path d="M{x.at(value):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{x.at(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:,.4g}</text>')
    for value in y.decades():
        parts.append(f'<path d="M{LEFT} {y.at(value):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y.at(value) + 4:.1f}" text-anchor="end">{value:,.4g}</text>')
    return parts


def _line(line: Line, colour: str, number: int, x: Axis, y: Axis) -> list[str]:
    points = [(x.at(px), y.at(py)) for px, py in line.points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    legend = TOP + 16 + 18 * number
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points),
        f'<text x="{LEFT + 10}" y="{legend}" fill="{colour}">{line.name}</text>',
    ]
