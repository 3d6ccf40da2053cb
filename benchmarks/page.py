"""Tables as Markdown, written between a script's markers in a page, so that no figure is ever typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, to_left: int = 1) -> str:
    """A Markdown table; so many columns to the left, the others to the right."""
    aligned = [*["---"] * to_left, *["---:"] * (len(head) - to_left)]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(aligned)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def require(path: Path, name: str) -> None:
    """End with a message unless the page has both markers once: asked before hours are spent on figures for it."""
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    if any(page.count(marker) != 1 for marker in _markers(name)):
        raise SystemExit(f"{path}: needs the lines {' and '.join(_markers(name))}, each once")


def write(path: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` in the page."""
    require(path, name)
    start, end = _markers(name)
    before, rest = path.read_text(encoding="utf-8").split(start)
    after = rest.split(end)[1]
    path.write_text(f"{before}{start}\n{text.rstrip()}\n{end}{after}", encoding="utf-8")


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"
