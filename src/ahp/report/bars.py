"""Bars that are cut into parts: where the time of a step and the bytes of a rank go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from ahp.report.html_parts import legend
from ahp.report.tables import share_words
from ahp.words import part_words

COLOURS = 10
"""Colors ``p0`` to ``p9`` of page.css; further parts start again at the first."""
Amount = Callable[[float], str]


def one_bar(parts: Mapping[str, float], amount: Amount) -> str:
    """One bar, the largest part first, with the name, amount and share of each. Empty parts are left out."""
    whole = sum(parts.values())
    there = sorted(((name, value) for name, value in parts.items() if value > 0), key=lambda part: -part[1])
    cuts = "".join(_cut(number, name, value, whole, amount) for number, (name, value) in enumerate(there))
    entries = [
        (colour(number), f"{part_words(name)} {amount(value)}, {share_words(value / whole)}")
        for number, (name, value) in enumerate(there)
    ]
    return f"<div class='bar'>{cuts}</div>{legend(entries)}"


def bars_of(
    rows: Iterable[tuple[str, Mapping[str, float], float, str]], amount: Amount, in_legend: Mapping[str, float]
) -> str:
    """A bar for each row: (name, its parts, what its full width stands for, words at its end). A part has one color in all rows.

    The legend has the amounts in ``in_legend``. A bar that is too long for its width has a red line where that ends.
    """
    rows = list(rows)
    sums: dict[str, float] = {}
    for _, parts, _, _ in rows:
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value
    names = sorted((name for name, total in sums.items() if total > 0), key=lambda name: -sums[name])
    drawn = "".join(_row(row, names, amount) for row in rows)
    words = (
        f"{part_words(name)} {amount(in_legend[name])}" if name in in_legend else part_words(name) for name in names
    )
    return f"<div class='bars'>{drawn}</div>{legend(zip(map(colour, range(len(names))), words, strict=True))}"


def _row(row: tuple[str, Mapping[str, float], float, str], names: Sequence[str], amount: Amount) -> str:
    name, parts, whole, words = row
    used = sum(parts.values())
    scale = max(whole, used)
    cuts = "".join(
        _cut(n, part, parts[part], scale, amount) for n, part in enumerate(names) if parts.get(part, 0.0) > 0
    )
    limit = f"<b style='left:{100 * whole / scale:.2f}%'></b>" if used > whole else ""
    over = " over" if used > whole else ""
    return (
        f"<div class='named'>{escape(name)}</div><div class='bar{over}'>{cuts}{limit}</div><div>{escape(words)}</div>"
    )


def _cut(number: int, name: str, value: float, whole: float, amount: Amount) -> str:
    words = escape(f"{part_words(name)}: {amount(value)}", quote=True)
    return f"<i class='{colour(number)}' style='width:{100 * value / whole:.3f}%' title='{words}'></i>"


def colour(number: int) -> str:
    """The class of a part's color."""
    return f"p{number % COLOURS}"
