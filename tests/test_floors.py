"""Imports run down the floors of the house (docs/architecture.md) and never up."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ahp"

FLOORS: list[set[str]] = [
    {"cache", "divisors", "errors", "run_files", "run_history", "shipped", "words", "yaml_text"},
    {"job"},
    {"violations", "stage_place"},
    {"plan"},
    {"config"},
    {"graph", "cluster", "schedule"},
    {"engines"},
    {"forecast"},
    {"search", "report", "export"},
    {"runtime"},
    {"cli"},
]
"""Lowest first. A room imports from itself and from lower floors; rooms of one floor do not know each other."""

LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
ABOVE_ALL = {"__init__", "__main__"}
"""The public face: it names every room, lazily."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str, path: Path) -> set[str]:
    """Rooms that a file imports anywhere in it, functions and TYPE_CHECKING blocks included."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = path.relative_to(PACKAGE.parent).parts[: -node.level]
            names = [".".join([*base, *(node.module or "").split(".")]).rstrip(".")]
        elif isinstance(node, ast.ImportFrom) and node.module == "ahp":
            names = [f"ahp.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        rooms |= {name.split(".")[1] for name in names if name.startswith("ahp.")}
    return rooms


FILES = sorted(path for path in PACKAGE.rglob("*.py") if room_of(path) not in ABOVE_ALL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_down(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no floor: add it to FLOORS and to docs/architecture.md"
    for other in imported_rooms(path.read_text(), path) - {room}:
        # A name of the public face (from ahp import search) has no floor of its own: it may be any room.
        assert other in LEVEL, f"{path.name} imports ahp.{other}: import from its room instead"
        assert LEVEL[other] < LEVEL[room], f"{path.name} of {room} imports {other}, which is not below it"


def test_the_reader_sees_every_form_of_import() -> None:
    source = """
import ahp.cli.main
from ahp import runtime
from ..forecast import step
def f():
    from ahp.search.ranking import search
"""
    assert imported_rooms(source, PACKAGE / "graph" / "trace.py") == {"cli", "runtime", "forecast", "search"}


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """Of some modules those that a file imports anywhere in it, functions and TYPE_CHECKING blocks included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules


@pytest.mark.parametrize("room", ["schedule", "engines", "forecast", "search", "runtime"])
def test_no_circle_of_imports(room: str) -> None:
    """Each file of a room can be read after those that it imports."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in (PACKAGE / room).rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: imported_modules(path.read_text(), set(files)) - {name} for name, path in files.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(files)  # raises CycleError with the circle
