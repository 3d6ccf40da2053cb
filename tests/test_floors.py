"""Imports run down the floors of the house (docs/architecture.md) and never up."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "ahp"

FLOORS: list[set[str]] = [
    {
        "about",
        "arrays",
        "cached_method",
        "divisors",
        "errors",
        "frozen_objects",
        "optional",
        "run_files",
        "run_history",
        "shipped",
        "words",
    },
    {"cache", "read_only", "violations", "whole_files", "yaml_text"},
    {"job"},
    {"stage_place", "step_forecast"},
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


@cache
def nodes_of(source: str) -> list[ast.Import | ast.ImportFrom]:
    """The imports anywhere in a file, functions and TYPE_CHECKING blocks included: read once for all tests."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported_rooms(source: str, path: Path) -> set[str]:
    """Rooms that a file imports anywhere in it, functions and TYPE_CHECKING blocks included."""
    rooms = set()
    for node in nodes_of(source):
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


def climbing(path: Path) -> list[str]:
    """What is wrong with the imports of a file."""
    room = room_of(path)
    if room not in LEVEL:
        return [f"{room} has no floor: add it to FLOORS and to docs/architecture.md"]
    others = imported_rooms(path.read_text(), path) - {room}
    # A name of the public face (from ahp import search) has no floor of its own: it may be any room.
    unknown = [f"{path} imports ahp.{other}: import from its room instead" for other in others - LEVEL.keys()]
    above = [other for other in others & LEVEL.keys() if LEVEL[other] >= LEVEL[room]]
    return [*unknown, *(f"{path} of {room} imports {other}, which is not below it" for other in above)]


def test_imports_run_down() -> None:
    """One test for all files: as one each they took five times as long."""
    assert len(FILES) > 100
    assert [wrong for path in FILES for wrong in climbing(path)] == []


def test_an_import_that_runs_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path / "ahp")
    for room, source, told in (
        ("graph", "from ahp.cli import main", "imports cli, which is not below it"),
        ("graph", "from ahp import cluster", "imports cluster, which is not below it"),
        ("graph", "from ahp import search_all", "import from its room instead"),
        ("attic", "", "attic has no floor"),
    ):
        path = tmp_path / "ahp" / room / "file.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        [wrong] = climbing(path)
        assert told in wrong


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
    for node in nodes_of(source):
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


MOST_ARGUMENTS, MOST_METHODS = 9, 39


@pytest.mark.slow
def test_functions_take_few_arguments_and_classes_have_few_methods() -> None:
    """Of all that plans; a run's settings are ``Trainer``'s arguments."""
    found = []
    for path in (path for path in FILES if room_of(path) != "runtime"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len(names) - (names[:1] in (["self"], ["cls"])) > MOST_ARGUMENTS:
                    found.append(f"{path}: {node.name} takes {len(names)} arguments")
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(one, ast.FunctionDef) for one in node.body)
                if methods > MOST_METHODS:
                    found.append(f"{path}: {node.name} has {methods} methods")
    assert found == []
