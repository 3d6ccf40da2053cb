"""The commands' tests plan the same few models again and again: here each graph is traced once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from ahp.graph.operators import ModelGraph


@pytest.fixture(scope="session")
def graphs() -> dict[str, ModelGraph]:
    """By what was asked; they never change."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def _each_graph_is_traced_once(graphs: dict[str, ModelGraph]) -> Iterator[None]:
    from ahp.graph import trace

    traced = trace.analyze

    def analyze(model: Any, job: Any = None, **more: Any) -> ModelGraph:
        if isinstance(model, str) and "/" in model:  # a file may have changed
            return traced(model, job, **more)
        asked = json.dumps([model, job, more], default=repr, sort_keys=True)
        if asked not in graphs:
            graphs[asked] = traced(model, job, **more)
        return graphs[asked]

    with mock.patch.object(trace, "analyze", analyze):
        yield


@pytest.fixture(autouse=True)
def _as_wide_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is broken for a terminal's width alone, which pytest's processes have one of; tests of widths set their own."""
    monkeypatch.delenv("COLUMNS", raising=False)
