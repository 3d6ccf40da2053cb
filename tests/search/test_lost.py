"""One node, or one device, fewer: the best plan on what is left, or why there is none."""

from __future__ import annotations

import pytest

from ahp.cluster.model import Cluster
from ahp.plan import Plan
from ahp.search.lost import _compared, _still_there, _without_one, one_lost
from ahp.search.problem import Problem, with_devices
from ahp.search.ranking import search
from tests.search.small import graph, small, with_memory

FIXED = {"micro_batch_size": 2}


def best(asked: Problem) -> Plan:
    arguments = graph("llama"), asked.cluster, asked.job
    return search(*arguments, constraints=asked.constraints, engine=asked.engine, keep=1).fastest


def test_a_node_fewer_is_a_search_on_the_rest() -> None:
    asked = small(cluster="2x2xH100-SXM-80GB", batch=32, constraints=FIXED)
    lost = one_lost(asked, best(asked))
    rest = best(asked.on(with_devices(asked.cluster, 2)))
    assert rest.forecast is not None
    assert (lost.left, lost.plan, lost.step_time_s) == (2, rest.parallelism, rest.forecast.step_time_s)
    assert lost.words().startswith(f"If one of 2 nodes were lost: {rest.parallelism.short()}, ")
    assert "fewer tokens/s" in lost.words()


def test_fewer_devices_that_are_faster_are_told() -> None:
    """Between nodes the gradients take longer than a node needs for all of the batch."""
    slow = Cluster.from_dict({"nodes": 2, "devices_per_node": 2, "device": "H100-SXM-80GB", "inter_node_gbps": 0.01})
    asked = small(cluster=slow, batch=32, constraints=FIXED)
    plan = best(asked)
    lost = one_lost(asked, plan)
    assert lost.faster is not None
    assert lost.step_time_s is not None
    assert lost.step_time_s < plan.priced.step_time_s
    assert "on 2 devices of 4, " in lost.faster
    assert lost.faster.endswith("less; --objective tokens-per-day chooses how many")
    usual = small(cluster="2x2xH100-SXM-80GB", batch=32, constraints=FIXED)
    assert one_lost(usual, best(usual)).faster is None
    fixed = small(cluster=slow, batch=32, constraints={"data_parallel_replicate_degree": 4, **FIXED})
    lost = one_lost(fixed, best(fixed))
    assert "free" in lost.verdict
    assert lost.faster is None, "the user wants all devices"


def test_of_what_is_left_not_all_must_be_used() -> None:
    asked = small(cluster="6xH100-SXM-80GB", batch=32, constraints=FIXED)
    lost = one_lost(asked, best(asked))
    assert lost.plan is not None
    assert lost.plan.world_size == 4
    assert "on 4 of the 5 devices left" in lost.verdict


def test_what_is_fixed_and_cannot_be_kept_is_freed_and_told() -> None:
    asked = small(cluster="2x2xH100-SXM-80GB", constraints={"data_parallel_shard_degree": 4, "micro_batch_size": 2})
    lost = one_lost(asked, best(asked))
    assert lost.plan is not None
    assert lost.verdict.endswith("with data_parallel_shard_degree, micro_batch_size free")


def test_devices_that_are_not_used_take_over() -> None:
    asked = small(cluster="2x2xH100-SXM-80GB")
    plan = best(asked.on(with_devices(asked.cluster, 2)))
    assert not _still_there(best(asked), with_devices(asked.cluster, 2))
    lost = one_lost(asked, plan)
    assert lost.plan == plan.parallelism
    assert "2 devices left are enough for the same plan, which takes 2" in lost.verdict


def test_nothing_left_and_nothing_that_fits_are_told() -> None:
    alone = small(cluster="H100-SXM-80GB")
    lost = one_lost(alone, best(alone))
    assert lost.words() == "If the only device were lost: nothing is left to run on"
    pair = small(cluster="2xH100-SXM-80GB")
    tight = pair.on(with_memory(pair.cluster, 1_000_000))
    lost = one_lost(tight, best(pair))
    assert lost.plan is None
    assert lost.verdict.startswith("no plan of the same batch fits on what is left; the nearest, dp1x1")
    assert "does not fit: " in lost.verdict


def test_of_a_mixed_cluster_a_node_of_the_largest_group_is_lost() -> None:
    groups = [
        {"name": "new", "nodes": 2, "devices_per_node": 1, "device": "H100-SXM-80GB"},
        {"name": "old", "nodes": 1, "devices_per_node": 1, "device": "A100-SXM-80GB"},
    ]
    cluster = Cluster.from_dict({"groups": groups, "links": [{"between": ["new", "old"], "gbps": 100}]})
    what, left = _without_one(cluster)
    assert what == "one of 2 nodes of new"
    assert left is not None
    assert [(group.name, group.nodes) for group in left.groups] == [("new", 1), ("old", 1)]
    what, last = _without_one(left)
    assert what == "the node of new"
    assert last is not None
    assert [group.name for group in last.groups] == ["old"]
    assert last.links == ()


def test_nothing_that_fits_on_what_is_left_of_a_mixed_cluster_is_told_of_a_group() -> None:
    groups = [
        {"name": "new", "nodes": 2, "devices_per_node": 1, "device": "H100-SXM-80GB"},
        {"name": "old", "nodes": 1, "devices_per_node": 1, "device": "A100-SXM-80GB"},
    ]
    roomy = small(cluster="3xH100-SXM-80GB")
    cluster = Cluster.from_dict({"groups": groups, "links": [{"between": ["new", "old"], "gbps": 100}]})
    small_ones = [
        group.model_copy(update={"device": group.device.model_copy(update={"memory_bytes": 1_000_000})})
        for group in cluster.groups
    ]
    tight = roomy.on(cluster.model_copy(update={"groups": tuple(small_ones)}))
    lost = one_lost(tight, best(roomy))
    assert lost.plan is None
    assert lost.verdict.startswith("no plan of the same batch fits on what is left; the nearest, dp1x1")


@pytest.mark.parametrize(
    ("loss", "told"), [(0.25, "25 % fewer"), (-0.02, "2.0 % more"), (-0.0004, "as many"), (-12.5, "13.5 times as many")]
)
def test_what_is_left_is_as_fast_where_it_nearly_is(loss: float, told: str) -> None:
    assert _compared(loss) == f"{told} tokens/s"


@pytest.mark.parametrize("cluster", ["3x1xH100-SXM-80GB", "3xH100-SXM-80GB"])
def test_a_batch_that_what_is_left_cannot_divide(cluster: str) -> None:
    asked = small(cluster=cluster, batch=3, constraints={"data_parallel_shard_degree": 3})
    lost = one_lost(asked, best(asked))
    assert lost.plan is not None
    assert lost.plan.num_micro_batches(asked.job) * lost.plan.data_parallel_degree * lost.plan.micro_batch_size == 3
