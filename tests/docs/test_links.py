"""No link leads nowhere, also not to a heading; every page is reached, and every decision is in the list of decisions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, links, named, pages

READMES = ("README.md", "README.zh.md")
DECISIONS = ROOT / "docs" / "decisions"
HEADINGS = ["Decision", "Why", "Also considered", "Left open, and what would change it"]
MOST_LINES = 45


@pytest.mark.parametrize("page", pages(), ids=named)
def test_links_resolve(page: Path) -> None:
    lost = []
    for link in links(page):
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (heading and target.suffix == ".md" and heading not in anchors(target)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("name", READMES)
def test_every_page_is_reached_from_the_readme(name: str) -> None:
    reached, waiting = set(), [ROOT / name]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link[0] != "#"]
            waiting += [target for target in targets if target.suffix == ".md"]
    assert [named(page) for page in pages() if page not in reached] == []


@pytest.mark.parametrize("page", sorted(DECISIONS.glob("*.md")), ids=lambda page: page.stem)
def test_a_decision_is_short_and_says_why(page: Path) -> None:
    if page.name == "README.md":
        return
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS


def test_the_list_has_every_decision_by_its_title() -> None:
    listed = dict(re.findall(r"^- \[(.*)\]\((.*)\)$", (DECISIONS / "README.md").read_text(), re.MULTILINE))
    files = {page for page in DECISIONS.glob("*.md") if page.name != "README.md"}
    assert listed == {page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "): page.name for page in files}
