"""Tables as Markdown, written between a script's markers in a page, so that no figure is ever typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def write(path: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` in the page; both must be there once."""
    page = path.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if page.count(start) != 1 or page.count(end) != 1:
        raise SystemExit(f"{path}: needs the lines {start.strip()} and {end}, each once")
    before, rest = page.split(start)
    after = rest.split(end)[1]
    path.write_text(f"{before}{start}{text.rstrip()}\n{end}{after}", encoding="utf-8")
