"""Mixed clusters: what a group of other devices changes, and what must not change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ahp.cluster.cells import place
from ahp.cluster.model import Cluster, GroupLink, Link, NodeGroup
from ahp.errors import BadInput, NotExpressible
from ahp.forecast.step import price
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

JOB = Job(sequence_length=64, global_batch_size=32, precision="bf16")
TORCHTITAN, MEGATRON = EngineChoice(name="torchtitan"), EngineChoice(name="megatron")
NETWORK = Link(bandwidth_bytes_per_s=4e11, latency_s=4e-6)
"""Between the nodes of ``make_cluster``."""


def group(called: str, nodes: int, per_node: int, *, network: Link = NETWORK, **device: Any) -> NodeGroup:
    """A group of ``make_cluster``'s nodes, with figures of its device changed."""
    found = make_cluster(nodes=nodes, per_node=per_node).groups[0]
    changed = found.device.model_copy(update=device)
    return found.model_copy(update={"name": called, "device": changed, "inter_node": network})


def mixed(*groups: NodeGroup, link: Link = NETWORK) -> Cluster:
    names = [g.name for g in groups]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return Cluster(groups=groups, links=tuple(GroupLink(between=pair, link=link) for pair in pairs))


def faster(times: float, precision: str = "bf16") -> dict[str, Any]:
    """Figures of ``make_cluster``'s device that computes and streams so many times as fast."""
    return {
        "peak_flops_per_s": {"bf16": times * 1e14, "fp32": times * 2e13},
        "memory_bandwidth_bytes_per_s": times * 1e12,
    }


DEGREES = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Parallelism, EngineChoice]:
    """Layouts of every axis that make_cluster's nodes hold whole, under an engine that has it."""
    engine = draw(st.sampled_from([EngineChoice(), TORCHTITAN, MEGATRON]))
    shard, pipeline = draw(DEGREES), draw(DEGREES)
    virtual = draw(st.sampled_from([1, 2])) if pipeline == 2 else 1
    layout = Parallelism(
        data_parallel_replicate_degree=draw(DEGREES),
        data_parallel_shard_degree=shard,
        zero_stage=draw(st.sampled_from([1, 2, 3] if shard > 1 else [0])),
        tensor_parallel_degree=draw(st.sampled_from([1, 2])),
        context_parallel_degree=draw(st.sampled_from([1, 2])) if engine.name != "ahp" else 1,
        pipeline_parallel_degree=pipeline,
        virtual_stages_per_rank=virtual,
        activation_checkpoint=draw(st.sampled_from(["none", "full", "auto"])),
    )
    return layout, engine


@given(
    layouts(),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.sampled_from(["toy", "H100-toy", "cpu"]),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_groups_of_one_kind_are_one_cluster(hand_graph, drawn, per_node, sizes, device):
    layout, engine = drawn
    width = layout.world_size // (layout.data_parallel_replicate_degree * layout.pipeline_parallel_degree)
    unit = max(1, width // per_node)
    nodes = layout.world_size // per_node // unit
    assume(nodes * unit * per_node == layout.world_size and 2 <= nodes <= sum(sizes))
    parts, left = [], nodes
    for i, size in enumerate(sizes):
        part = min(size, left) if i < len(sizes) - 1 else left
        if part:
            parts.append(group(f"g{i}", part * unit, per_node, name=device))
        left -= part
    assume(len(parts) > 1)
    try:
        plain = price(hand_graph, make_cluster(nodes=nodes * unit, per_node=per_node, name=device), JOB, layout, engine)
    except (BadInput, NotExpressible):
        assume(False)
        return
    same = price(hand_graph, mixed(*parts), JOB, layout, engine)
    expected, found = plain.forecast.model_dump(), same.forecast.model_dump()
    assert device in found.pop("mfu_peak")
    expected.pop("mfu_peak")
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9), key
    assert same.parallelism == plain.parallelism
    assert place(mixed(*parts), layout).ranks == list(range(layout.world_size))
    assert same.span.ends_s == pytest.approx(plain.span.ends_s, rel=1e-9)
