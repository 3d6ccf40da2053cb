"""The public face: names come when asked for, and ``import ahp`` stays light."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import ahp

HEAVY = ("torch", "transformers", "pandas", "plotly", "scipy")


def heavy_modules_after(code: str) -> list[str]:
    probe = f"import sys\n{code}\nimport json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.strip().splitlines()[-1])


def test_import_is_light() -> None:
    assert heavy_modules_after("import ahp; dir(ahp); ahp.Plan; ahp.Cluster; ahp.Job; ahp.errors") == []


def test_help_is_light() -> None:
    assert heavy_modules_after("from ahp.cli.main import main; main(['--help'])") == []


@pytest.mark.parametrize("name", ["Plan", "Parallelism", "Forecast", "Job", "Cluster", "errors", "__version__"])
def test_names_resolve(name: str) -> None:
    assert getattr(ahp, name) is not None
    assert name in dir(ahp)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sreach'"):
        ahp.sreach  # noqa: B018  # pyright: ignore


def test_search_is_a_verb_whatever_was_imported_first() -> None:
    importlib.import_module("ahp.search")
    assert callable(ahp.search)
