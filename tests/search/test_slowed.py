"""A slow device becomes a group of its own, and the search says what a plan gains that knows of it."""

from __future__ import annotations

from typing import Any

import pytest

from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.graph.trace import analyze
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
