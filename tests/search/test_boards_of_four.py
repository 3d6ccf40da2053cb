"""Nodes of four devices without an NVLink switch: prices, bounds and remarks."""

from __future__ import annotations

import warnings
from functools import cache

import pytest

from ahp.cluster.model import Cluster
from ahp.forecast.open_switch import open_switch
from ahp.forecast.step import simulate
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import Forecast, Parallelism
from ahp.search.problem import Problem, problem
from ahp.search.ranking import search
from ahp.search.space import build

from .small import TRAINED, small
from .test_bounds import holds

JOB = Job(sequence_length=4096, global_batch_size=8, precision="bf16")
PAIRS = Parallelism(tensor_parallel_degree=2, enable_sequence_parallel=True, data_parallel_replicate_degree=2)


def board(switch: bool | None, nodes: int = 1, device: str = "H200-SXM-141GB") -> Cluster:
    return Cluster.from_dict({"nodes": nodes, "devices_per_node": 4, "device": device, "nvlink_switch": switch})


@cache
def trained() -> ModelGraph:
    return analyze({"model_type": "llama", "num_hidden_layers": 4, "vocab_size": 32000, **TRAINED}, JOB)


def price(cluster: Cluster, layout: Parallelism) -> Forecast:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulate(model=trained(), cluster=cluster, job=JOB, parallelism=layout)


def with_links(share: float) -> Cluster:
    """A board with a switch, and so much of the links."""
    group = board(True).groups[0]
    link = group.intra_node.model_copy(update={"bandwidth_bytes_per_s": share * group.intra_node.bandwidth_bytes_per_s})
    return Cluster(groups=(group.model_copy(update={"intra_node": link}),))


@pytest.mark.slow
def test_two_tensor_ranks_take_what_a_third_of_the_links_gives() -> None:
    apart, third, joined = (price(cluster, PAIRS) for cluster in (board(False), with_links(1 / 3), board(True)))
    assert apart.step_time_s == pytest.approx(third.step_time_s, rel=1e-6)
    assert apart.step == pytest.approx(third.step, rel=1e-6), "but for the norm of all four ranks"
    assert apart.step["tensor_parallel"] > 2 * joined.step["tensor_parallel"]
    assert price(board(None), PAIRS) == joined, "what the cluster does not say is priced with a switch"


def test_a_mixed_cluster_has_the_links_of_each_group() -> None:
    """Stages of two tensor ranks and two replicas on each of two kinds of nodes; only one kind may have no switch."""

    def on(switch: bool) -> Forecast:
        own = {"name": "a", "devices_per_node": 4, "device": "H200-SXM-141GB", "nvlink_switch": switch}
        other = {"name": "b", "devices_per_node": 4, "device": "H100-PCIe-80GB"}
        stages = [{"group": "a", "layers": 3}, {"group": "b", "layers": 1}]
        layout = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}
        return price(
            Cluster.from_dict({"groups": [own, other]}), Parallelism.model_validate({**layout, "stages": stages})
        )

    joined, apart = on(True), on(False)
    assert apart.step["tensor_parallel"] > 2 * joined.step["tensor_parallel"]
    assert apart.step["gradient_reduce"] > 2 * joined.step["gradient_reduce"]
    assert (apart.step["forward"], apart.step["backward"]) == (joined.step["forward"], joined.step["backward"])


def test_four_ranks_have_all_links() -> None:
    layout = Parallelism(data_parallel_shard_degree=4, zero_stage=3)
    assert price(board(False), layout) == price(board(True), layout)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "nodes"), [("llama", 1), ("experts", 1), ("llama", 2)])
def test_no_bound_is_above_the_forecast(model: str, nodes: int) -> None:
    asked = small(model, board(False, nodes))
    space = build(asked)
    places = [(block, int(space.blocks.rows[block]) - 1) for block in range(0, len(space.blocks), 3)]
    holds(asked, space, places)


def test_no_bound_is_above_the_forecast_where_links_take_most_of_the_time() -> None:
    asked = wide(board(False))
    space = build(asked)
    pairs = [block for block in range(len(space.blocks)) if space.blocks.tensor[block] == 2]
    assert pairs
    holds(asked, space, [(block, 0) for block in pairs[::2]])


def wide(cluster: Cluster) -> Problem:
    return problem(trained(), cluster, JOB, {"tensor_parallel_degree": 2, "micro_batch_size": 1}, {"compile": False})


def test_a_plan_that_depends_on_a_switch_says_so() -> None:
    def notes(switch: bool | None, tensor: int) -> str:
        fixed = {"tensor_parallel_degree": tensor, "activation_checkpoint": "full"}
        return " ".join(search(trained(), board(switch), JOB, constraints=fixed, keep=1).notes)

    assert "4 H200-SXM-141GB may be a board without an NVLink switch" in notes(None, 2)
    for switch, tensor in ((True, 2), (False, 2), (None, 4)):
        assert "switch" not in notes(switch, tensor), (switch, tensor)


def test_a_plan_on_half_of_such_a_node_says_so_too() -> None:
    ones = ("data_parallel_replicate", "data_parallel_shard", "pipeline_parallel", "context_parallel")
    fixed = {"tensor_parallel_degree": 2, **{f"{axis}_degree": 1 for axis in ones}}
    ranking = search(trained(), board(None), JOB, constraints=fixed, keep=1, objective="tokens-per-day")
    assert ranking.best.parallelism.world_size == 2
    assert any("may be a board without an NVLink switch" in note for note in ranking.notes)


def test_the_verb_for_one_layout_warns() -> None:
    with pytest.warns(UserWarning, match="nvlink_switch of the cluster"):
        simulate(model=trained(), cluster=board(None), job=JOB, parallelism=PAIRS)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"tensor_parallel_degree": 2}, True),
        ({"tensor_parallel_degree": 3}, True),
        ({"tensor_parallel_degree": 4}, False),
        ({"context_parallel_degree": 2}, True),
        ({"pipeline_parallel_degree": 4}, True),  # a stage sends to the next
        ({"data_parallel_replicate_degree": 2}, True),
        ({"data_parallel_replicate_degree": 8}, False),
        ({"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2, "zero_stage": 3}, False),
        ({"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2, "zero_stage": 3}, True),
        ({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 4}, False),
    ],
)
def test_which_layouts_depend_on_a_switch(layout: dict[str, int], told: bool) -> None:
    parallelism = Parallelism.model_validate(layout)
    assert (open_switch(board(None, nodes=2), parallelism) is not None) == told
    for cluster in (board(False, nodes=2), board(True, nodes=2), Cluster.parse("2x8xH200"), Cluster.parse("2x4xT4")):
        assert open_switch(cluster, parallelism) is None
