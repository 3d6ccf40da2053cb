"""Pieces that every section of a page is made of. Text is escaped here, so that no file of a run can put markup into the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ahp.report.tables import unbroken

LONG = 24
"""A cell with more letters than this can break into lines, and gets the room for it."""


@dataclass(frozen=True)
class Html:
    """Markup that is already safe."""

    text: str


def section(title: str, *inside: str) -> str:
    """A box with a heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(inside)}</section>"


def in_pairs(charts: Sequence[tuple[str, str]]) -> str:
    """Charts under their titles, side by side if the page is wide."""
    return f"<div class='two'>{''.join(section(title, chart) for title, chart in charts)}</div>" if charts else ""


def note(words: str) -> str:
    """A remark in small letters."""
    return f"<p class='note'>{escape(words)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows of text or ``Html``; on a narrow page it scrolls by itself."""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div class='scroll'><table class='{'head' if head else 'pairs'}'>{top}<tbody>{body}</tbody></table></div>"


def _cell(value: Any) -> str:
    if isinstance(value, Html):
        return f"<td>{value.text}</td>"
    words = unbroken(plain_words(value))
    return f"<td{' class=long' if len(words) > LONG else ''}>{escape(words)}</td>"


def plain_words(value: Any) -> str:
    """A setting as a person writes it: yes and no, lists without brackets, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{str(key).replace('_', ' ')} {plain_words(one)}" for key, one in value.items())
    if isinstance(value, float):
        return f"{value:.10g}"  # two that differ are not to look alike
    return str(value)


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Figures that stand out: (name, value, note) each."""
    each = (
        f"<div><b>{escape(name)}</b><strong>{escape(value)}</strong><i>{escape(words)}</i></div>"
        for name, value, words in items
    )
    return f"<div class='cards'>{''.join(each)}</div>"


def legend(items: Iterable[tuple[str, str]]) -> str:
    """(class of the colour, words) each."""
    each = (f"<li><i class='key {style}'></i>{escape(unbroken(words))}</li>" for style, words in items)
    return f"<ul class='legend'>{''.join(each)}</ul>"


def data(value: Any) -> str:
    """Data for the page's script, written so that no text in it can end the script element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f"<script type='application/json'>{text}</script>"
