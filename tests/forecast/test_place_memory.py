"""The memory of every rank: the forecast's fullest rank is among the places, and every rank is in one place."""

from __future__ import annotations

import pytest

from ahp.cluster.model import Cluster
from ahp.forecast.step import pricer
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import Parallelism, StagePlace

JOB = Job(sequence_length=512, global_batch_size=16, precision="bf16")
MIXED = {
    "groups": [
        {"name": "a", "device": "H100-SXM-80GB", "nodes": 1, "devices_per_node": 4, "inter_node_gbps": 100},
        {"name": "b", "device": "A100-SXM-40GB", "nodes": 1, "devices_per_node": 4, "inter_node_gbps": 100},
    ],
    "links": [{"between": ["a", "b"], "gbps": 100}],
}


@pytest.fixture(scope="module")
def gpt() -> ModelGraph:
    return analyze("gpt2", JOB)


@pytest.mark.parametrize(
    "layout",
    [
        Parallelism(data_parallel_shard_degree=8),
        Parallelism(pipeline_parallel_degree=4, data_parallel_replicate_degree=2),
        Parallelism(
            pipeline_parallel_degree=2, tensor_parallel_degree=2, data_parallel_replicate_degree=2,
            mesh_order=("dp_replicate", "pp", "tp"),
        ),
    ],
    ids=Parallelism.short,
)  # fmt: skip
def test_every_rank_has_a_place_and_the_fullest_is_the_forecasts(gpt: ModelGraph, layout: Parallelism) -> None:
    prices = pricer(gpt, Cluster.parse("1x8xH100-SXM-80GB"), JOB)
    priced = prices.price(layout)
    places = prices.memory_of_places(priced)
    assert sorted(rank for place in places for rank in place.ranks) == list(range(8))
    fullest = max(places, key=lambda place: place.memory.total)
    assert priced.forecast.fullest_rank in fullest.ranks
    assert fullest.memory.parts == priced.forecast.memory


def test_ranks_of_a_mixed_cluster_have_their_own_devices(gpt: ModelGraph) -> None:
    stages = (StagePlace(group="b", layers=4), StagePlace(group="a", layers=8))
    layout = Parallelism(pipeline_parallel_degree=2, data_parallel_replicate_degree=4, stages=stages)
    prices = pricer(gpt, Cluster.from_dict(MIXED), JOB)
    priced = prices.price(layout)
    places = prices.memory_of_places(priced)
    assert sorted(rank for place in places for rank in place.ranks) == list(range(8))
    assert {place.device for place in places} == {"H100-SXM-80GB", "A100-SXM-40GB"}
    fullest = max(places, key=lambda place: place.memory.total / place.capacity_bytes)
    assert priced.forecast.fullest_rank in fullest.ranks
    assert fullest.memory.parts == priced.forecast.memory
