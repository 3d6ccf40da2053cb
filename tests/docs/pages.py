"""The project's pages as their readers see them: blocks of code, links, headings."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page of the repository: beside the READMEs those of docs."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text(encoding="utf-8")
    return tuple(
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], textwrap.dedent(found[3]))
        for found in FENCE.finditer(text)
    )


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code and spans of code, in which nothing is a link or a heading."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", lambda span: span[0].replace("](", "] ("), text)


def links(page: Path) -> list[str]:
    """Where a page leads inside of the repository: ``file``, ``file#heading`` or ``#heading``."""
    return [target for target in LINK.findall(prose(page)) if "://" not in target and not target.startswith("mailto:")]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The headings of a page as GitHub and the site's tool write them behind ``#``."""
    found: dict[str, int] = {}
    made = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        made.add(anchor if anchor not in found else f"{anchor}-{found[anchor]}")
        found[anchor] = found.get(anchor, 0) + 1
    return frozenset(made)


def commands(block: Block) -> list[str]:
    """The commands of a shell block, one a line, lines that end in a backslash joined and remarks cut off."""
    lines = block.code.replace("\\\n", " ").splitlines()
    plain = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in lines]
    return [" ".join(line.split()) if '"' not in line else line for line in plain if line]
