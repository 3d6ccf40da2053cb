"""docs/reference says what the code says: it is made from it and never written by hand."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

import ahp
from ahp.cli.main import COMMANDS
from ahp.config import HELP
from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return script().pages()


def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("reference", ROOT / ".ci" / "reference.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_pages_are_those_that_the_code_makes(made: dict[str, str]) -> None:
    kept = {page.name: page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md")}
    assert kept == made, "run .venv/bin/python .ci/reference.py"


def test_nothing_is_left_out(made: dict[str, str]) -> None:
    for key in HELP:
        assert f"**`{key.rpartition('.')[2]}`**: " in made["config.md"], key
    for name in set(ahp.__all__) - {"__version__", "errors"}:
        assert f"### ahp.{name}\n" in made["python.md"], name
    for name in COMMANDS:
        assert f"## ahp {name}\n" in made["commands.md"], name
    assert "whole number from 0 on, up to 3" in made["config.md"]  # zero_stage: types come from the schema
    assert "default `200`" in made["config.md"]
