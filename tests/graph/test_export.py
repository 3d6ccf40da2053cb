"""The graph survives JSON, with its law of growth; DOT draws each operator and dependency."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from ahp.graph.export import from_plain, to_dot, to_json
from ahp.graph.operators import ModelGraph
from ahp.graph.trace import analyze
from tests.graph.small import SEQUENCE, Custom, marked, traced


@pytest.fixture(scope="module", params=["gpt2", marked("gemma3"), "custom"])
def graph(request: pytest.FixtureRequest) -> ModelGraph:
    if request.param == "custom":
        return analyze(Custom(), {"sequence_length": SEQUENCE})
    return traced(request.param)


@pytest.mark.slow
def test_json_reads_back_to_the_same_graph(graph: ModelGraph) -> None:
    again = from_plain(json.loads(to_json(graph)))
    assert again == graph
    assert again.at(3) == graph.at(3)
    assert from_plain(json.loads(to_json(graph.at(2)))) == graph.at(2)


def test_json_says_the_totals_and_the_shapes(graph: ModelGraph) -> None:
    data = json.loads(to_json(graph))
    assert data["totals"]["num_parameters"] == graph.num_parameters
    assert data["totals"]["forward_flops"] + data["totals"]["backward_flops"] == graph.flops()
    lookup = next(o for o in data["embedding"]["operators"] if o["name"] == "aten.embedding")
    assert lookup["inputs"][1] == ["int64", 1, SEQUENCE]


def test_dot_draws_every_operator_and_dependency(graph: ModelGraph) -> None:
    parts = (graph.embedding, *graph.blocks, graph.head)
    text = to_dot(graph)
    operators = sum(len(part.operators) for part in parts)
    edges = sum(len(o.depends_on) for part in parts for o in part.operators)
    assert text.count("[label=") == operators
    assert text.count(" -> ") == edges + len(parts) - 1
    assert text.count("{") == text.count("}") == 1 + len(parts)
    assert f'label="{graph.blocks[0].name} x {graph.layers.count(0)}"' in text


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_reads_it(graph: ModelGraph) -> None:
    subprocess.run(["dot", "-Tcanon", "-o/dev/null"], input=to_dot(graph), text=True, check=True)
