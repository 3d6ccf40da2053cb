"""What is taken from measured runs: every constant says what it is and where it comes from, and each is used."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from ahp.cluster.model import Calibration, Cluster, GroupLink, Link, Measurements
from ahp.forecast.constants import margins
from ahp.forecast.memory import fit_probability
from ahp.forecast.step import price
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

JOB = Job(sequence_length=64, global_batch_size=8, precision="bf16")


def two_kinds() -> Cluster:
    """Two nodes of one device each, of different names."""
    groups = (make_cluster(per_node=1, name=f"toy-{kind}").groups[0].model_copy(update={"name": kind}) for kind in "ab")
    link = Link(bandwidth_bytes_per_s=1e10, latency_s=4e-6)
    return Cluster(groups=tuple(groups), links=(GroupLink(between=("a", "b"), link=link),))


def calibrated(name: str) -> Cluster:
    """Two devices on which a run was held against its forecast."""
    [nodes] = make_cluster(per_node=2, name=name).groups
    known = Calibration(step_ratio=1.0, runs=1, source="a test")
    return Cluster(groups=(nodes.model_copy(update={"calibration": known}),))


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    model = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return analyze(model | {"intermediate_size": 128, "vocab_size": 256}, JOB)


def forecasts(graph: ModelGraph):
    """On GPUs that publishers measured, on others of the catalogue, on GPUs and CPU workers that were measured, on workers that were
    not, on two kinds of GPUs, after runs on GPUs and on workers, and of a device that is nearly full."""
    layout = Parallelism(data_parallel_replicate_degree=2)
    clusters = (
        make_cluster(per_node=2, name="A100-SXM-80GB"),
        make_cluster(per_node=2),
        make_cluster(per_node=2, measured=Measurements()),
        make_cluster(name="cpu", per_node=2),
        make_cluster(name="cpu", per_node=2, measured=Measurements()),
        two_kinds(),
        calibrated("toy"),
        calibrated("cpu"),
    )
    steps = [price(graph, cluster, JOB, layout, EngineChoice()).forecast for cluster in clusters]
    return steps, fit_probability(0.95e9, 1e9)


@pytest.mark.parametrize("name", list(margins.all))
def test_every_margin_enters_a_forecast(name: str, graph: ModelGraph) -> None:
    before = forecasts(graph)
    margin = margins.all[name]
    assert len(margin.derivation) > 40
    assert margin.unit
    assert margin.meaning
    changed = {**margins.all, name: replace(margin, value=1.5 * margin.value)}
    with patch.object(margins, "all", changed):
        assert forecasts(graph) != before


def test_a_margin_of_nothing_is_refused() -> None:
    with pytest.raises(AssertionError):
        replace(margins.all["allocated_error"], value=0.0)
