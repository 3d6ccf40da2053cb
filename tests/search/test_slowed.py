"""A slow device becomes a group of its own, and the search says what a plan gains that knows of it."""

from __future__ import annotations

from typing import Any

import pytest

from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import Parallelism
from ahp.search.problem import problem
from ahp.search.ranking import search
from ahp.search.slowed import gain, with_slow

MODEL = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip


def groups(cluster: Cluster) -> list[tuple[str, int, int]]:
    return [(group.name, group.nodes, group.devices_per_node) for group in cluster.groups]


@pytest.mark.parametrize(
    ("text", "rank", "expected"),
    [
        ("4xH100-SXM-80GB", 3, [("nodes", 1, 3), ("slow", 1, 1)]),
        ("4xH100-SXM-80GB", 0, [("slow", 1, 1), ("nodes", 1, 3)]),
        ("3x2xH100-SXM-80GB", 5, [("nodes", 2, 2), ("slow", 1, 2)]),
        ("3x2xH100-SXM-80GB", 1, [("slow", 1, 2), ("nodes", 2, 2)]),
        ("2x2xH100-SXM-80GB", 2, [("nodes", 1, 2), ("slow", 1, 2)]),
        ("H100-SXM-80GB", 0, [("nodes", 1, 1)]),
    ],
)
def test_the_device_or_its_node_is_taken_out_of_its_group(text: str, rank: int, expected: list[Any]) -> None:
    cluster = Cluster.parse(text)
    layout = Parallelism(data_parallel_replicate_degree=cluster.num_devices)
    found = with_slow(cluster, layout, rank, 1.5)
    assert groups(found) == expected
    before = cluster.groups[0].device
    slow = next(group for group in found.groups if group.name == "slow" or len(expected) == 1).device
    assert slow.peak_flops_per_s["bf16"] == pytest.approx(before.peak_flops_per_s["bf16"] / 1.5)
    assert slow.memory_bytes == before.memory_bytes
    assert Cluster.from_dict(found.plain()) == found, "it can be written and read"


def test_a_second_slow_device_is_another_group() -> None:
    layout = Parallelism(data_parallel_replicate_degree=4)
    once = with_slow(Cluster.parse("4xH100-SXM-80GB"), layout, 3, 1.5)
    twice = with_slow(once, layout, 0, 1.5)
    assert groups(twice) == [("slow-2", 1, 1), ("nodes", 1, 2), ("slow", 1, 1)]
    assert Cluster.from_dict(twice.plain()) == twice


@pytest.mark.parametrize(
    ("rank", "expected"), [(5, [("nodes", 2, 2), ("slow", 1, 2)]), (1, [("slow", 1, 2), ("nodes", 2, 2)])]
)
def test_the_links_of_a_node_are_slow_where_it_is_the_network(rank: int, expected: list[Any]) -> None:
    cluster = Cluster.parse("3x2xH100-SXM-80GB")
    layout = Parallelism(data_parallel_replicate_degree=6)
    found = with_slow(cluster, layout, rank, 4.0, network=True)
    before = cluster.groups[0]
    assert groups(found) == expected
    assert [group.device for group in found.groups] == [before.device] * 2
    assert next(group for group in found.groups if group.nodes == 2).inter_node == before.inter_node
    [link] = found.links
    assert before.inter_node is not None
    assert link.link.bandwidth_bytes_per_s == pytest.approx(before.inter_node.bandwidth_bytes_per_s / 4)
    assert link.link.latency_s == pytest.approx(before.inter_node.latency_s * 4)
    assert Cluster.from_dict(found.plain()) == found


def test_the_links_of_a_group_of_one_node_are_slow_as_they_are() -> None:
    described = [
        {"name": "new", "nodes": 1, "devices_per_node": 2, "device": "H100-SXM-80GB"},
        {"name": "old", "nodes": 1, "devices_per_node": 2, "device": "A100-SXM-80GB"},
    ]
    cluster = Cluster.from_dict({"groups": described, "links": [{"between": ["new", "old"], "gbps": 400}]})
    replicas = Parallelism(data_parallel_replicate_degree=4)
    found = with_slow(cluster, replicas, 3, 2.0, network=True)
    assert found.groups == cluster.groups
    assert found.links[0].link.bandwidth_bytes_per_s == pytest.approx(cluster.links[0].link.bandwidth_bytes_per_s / 2)


@pytest.mark.slow
def test_the_best_layout_with_slow_links_sends_less_over_them() -> None:
    job = Job(global_batch_size=12, sequence_length=512, precision="bf16")
    graph, cluster = analyze(MODEL, job), Cluster.parse("3x1xH100-SXM-80GB")
    replicas = Parallelism(data_parallel_replicate_degree=3)
    even = search(graph, cluster, job, constraints=Constraints.exactly(replicas), keep=1).fastest
    assert even.forecast is not None
    found = gain(problem(graph, cluster, job, Constraints(), even.engine.decided()), even, 2, 20.0, network=True)
    assert found.today_s > 2 * even.forecast.step_time_s
    assert found.best_s < found.today_s / 2
    assert found.words().startswith("with the slow links of its node, ahp plan forecasts ")


@pytest.mark.slow
def test_the_best_layout_with_a_slow_device_is_faster_than_one_that_waits_for_it() -> None:
    job = Job(global_batch_size=12, sequence_length=512, precision="bf16")
    graph, cluster = analyze(MODEL, job), Cluster.parse("4xH100-SXM-80GB")
    replicas = Parallelism(data_parallel_replicate_degree=4)
    even = search(graph, cluster, job, constraints=Constraints.model_validate(replicas.model_dump(include={"data_parallel_replicate_degree"})), keep=1).fastest  # fmt: skip
    found = gain(problem(graph, cluster, job, Constraints(), even.engine.decided()), even, 3, 3.0)
    assert even.forecast is not None
    assert found.today_s > 2 * even.forecast.step_time_s
    assert found.best_s < found.today_s
    assert "more tokens/s" in found.words()
    assert found.plain()["words"] == found.words()
