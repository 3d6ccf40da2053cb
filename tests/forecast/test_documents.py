"""Packed documents are priced as the runtime keeps them apart: by their lengths where it runs so, with masks elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ahp.cluster.model import Cluster
from ahp.engines.registry import get
from ahp.forecast.compute import Work
from ahp.forecast.documents import attention_words, needs_masks
from ahp.forecast.gpu import kernel_of_lengths
from ahp.forecast.pricer import Pricer
from ahp.forecast.split import is_mask
from ahp.forecast.step import forecast, pricer
from ahp.forecast.units import Units, least_of
from ahp.graph.export import from_plain, to_json
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism
from tests.search.small import cpu_workers

LENGTH = 512
KEYS: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 1024,
}  # fmt: skip
PACKED = Job(sequence_length=LENGTH, global_batch_size=8, document_mask=True)
PLAIN = PACKED.model_copy(update={"document_mask": False})
ON_NVIDIA = "2xA100-SXM-80GB"
RING, ALL_TO_ALL = (
    Parallelism(context_parallel_degree=2, context_parallel_method=way) for way in ("ring", "all-to-all")
)


@pytest.fixture(scope="module")
def packed() -> ModelGraph:
    return analyze(KEYS, PACKED)


@pytest.fixture(scope="module")
def plain() -> ModelGraph:
    return analyze(KEYS, PLAIN)


def of(
    graph: ModelGraph,
    devices: str | Cluster = ON_NVIDIA,
    layout: Parallelism | None = None,
    job: Job = PACKED,
    choice: EngineChoice | None = None,
) -> Forecast:
    two = Parallelism(data_parallel_replicate_degree=2)
    return forecast(graph, Cluster.resolve(devices), job, layout or two, choice or EngineChoice())


def units(graph: ModelGraph, devices: str, layout: Parallelism, job: Job = PACKED) -> Units:
    found = pricer(graph, Cluster.parse(devices), job)
    assert isinstance(found, Pricer)
    return found.group.units(layout)


def masks(graph: ModelGraph) -> int:
    """How many results have the shape of a mask [.., sequence, sequence]."""
    return sum(is_mask(spec) for one in graph.segments() for op in one.operators for spec in op.outputs)


@pytest.mark.slow
def test_a_packed_job_has_a_graph_for_either_way(packed: ModelGraph, plain: ModelGraph) -> None:
    assert packed.by_lengths is not None
    assert packed.needs_masks is None
    assert masks(packed) > masks(packed.by_lengths) == 0
    assert packed.by_lengths.flops() == packed.flops()
    assert packed.by_lengths.blocks[0].saved_bytes < packed.blocks[0].saved_bytes
    assert (plain.by_lengths, plain.needs_masks) == (None, None)


def test_both_graphs_are_kept_exported_and_grown(packed: ModelGraph) -> None:
    read = from_plain(json.loads(to_json(packed)))
    assert read == packed
    assert read.by_lengths == packed.by_lengths is not None
    grown = packed.at(3)
    assert grown.by_lengths is packed.by_lengths
    assert grown.at(2) == packed.at(2)


@pytest.mark.parametrize(
    ("keys", "job", "attention", "reason"),
    [
        ({}, {"precision": "fp32"}, "flash", None),  # needs masks whatever the model, so nobody looks
        ({}, {}, "math", None),
        pytest.param({"hidden_size": 160}, {}, "flash", "its heads have widths of [20]", marks=pytest.mark.slow),
    ],
    ids=["fp32", "math", "odd heads"],
)
def test_no_graph_by_lengths_where_masks_are_needed(
    keys: dict[str, Any], job: dict[str, Any], attention: str, reason: str | None
) -> None:
    found = analyze(KEYS | keys, PACKED.model_copy(update=job), attention=attention)
    assert found.by_lengths is None
    assert found.needs_masks is None if reason is None else reason in (found.needs_masks or "")


def test_attention_by_lengths_is_half_the_square_and_keeps_no_mask(packed: ModelGraph, plain: ModelGraph) -> None:
    one = Parallelism(data_parallel_replicate_degree=2)
    by_lengths, alone = units(packed, ON_NVIDIA, one).blocks[0], units(plain, ON_NVIDIA, one, PLAIN).blocks[0]
    with_masks = units(packed, "2xV100-SXM-32GB", one).blocks[0]
    assert by_lengths.times.attention == alone.times.attention
    assert by_lengths.times.attention_backward == alone.times.attention_backward
    assert by_lengths.memory.saved == pytest.approx(alone.memory.saved, rel=0.01)
    assert (by_lengths.memory.masks, alone.memory.masks) == (0, 0)
    assert with_masks.memory.masks == LENGTH**2
    assert with_masks.memory.saved > by_lengths.memory.saved + 2 * LENGTH**2 - 4 * LENGTH


def test_masks_take_longer_and_more_memory_than_lengths(packed: ModelGraph) -> None:
    without = replace(packed, by_lengths=None)
    for devices in (ON_NVIDIA, "2xH100-SXM-80GB"):
        by_lengths, with_masks = of(packed, devices), of(without, devices)
        assert by_lengths.step_time_s < with_masks.step_time_s
        assert by_lengths.memory_allocated_bytes < with_masks.memory_allocated_bytes
    for devices in ("2xMI300X", cpu_workers(2, 4)):
        assert of(packed, devices) == of(without, devices)
    assert of(packed, layout=RING) == of(without, layout=RING)
    assert of(packed, layout=ALL_TO_ALL).step_time_s < of(without, layout=ALL_TO_ALL).step_time_s


def test_a_method_left_open_is_the_faster_of_lengths_and_masks(packed: ModelGraph) -> None:
    """Masks and lengths are priced with kernels of their own, so that either can be the faster."""
    open_method = Parallelism(context_parallel_degree=2)
    assert of(packed, layout=open_method).step_time_s == min(
        of(packed, layout=layout).step_time_s for layout in (RING, ALL_TO_ALL)
    )


def test_an_open_method_has_the_least_of_every_figure(packed: ModelGraph) -> None:
    each = [units(packed, ON_NVIDIA, layout) for layout in (RING, ALL_TO_ALL)]
    least, found = least_of(each), units(packed, ON_NVIDIA, Parallelism(context_parallel_degree=2))
    for one in (least, found):
        for part in ("embedding", "head"):
            assert getattr(one, part).times.forward_s == min(getattr(way, part).times.forward_s for way in each)
        block, blocks = one.blocks[0], [way.blocks[0] for way in each]
        assert block.times.forward == least_work([way.times.forward for way in blocks])
        assert block.memory.saved == min(way.memory.saved for way in blocks) < max(way.memory.saved for way in blocks)
        kept = [way.memory.beside_products.kept for way in blocks]
        assert block.memory.beside_products.kept == min(kept)


def least_work(alike: list[Work]) -> Work:
    return Work(min(one.device_s for one in alike), min(one.launches for one in alike))


def test_hopper_runs_flash_attention_2_by_lengths() -> None:
    """torch's cuDNN kernel reads masks, but knows no lengths."""
    kernels = {name: kernel_of_lengths(name) for name in ("ampere", "ada", "hopper", "blackwell", "volta", "cdna3")}
    assert list(kernels.values()) == ["flash2", "flash2", "torch_flash2", "torch_flash2", None, None]
    assert kernel_of_lengths(None) is None


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", [Parallelism(), RING, ALL_TO_ALL], ids=["whole", "ring", "all-to-all"])
@pytest.mark.parametrize("devices", ["2xH100-SXM-80GB", "2xV100-SXM-32GB", "2xMI300X"])
def test_prices_follow_the_reason_that_people_are_told(
    packed: ModelGraph, devices: str, layout: Parallelism, precision: Any
) -> None:
    job, cluster = PACKED.model_copy(update={"precision": precision}), Cluster.parse(devices)
    for choice in (EngineChoice(compile=False), EngineChoice(attention="math", compile=False)):
        for graph in (packed, replace(packed, by_lengths=None, needs_masks="of its blocks")):
            found, traits = pricer(graph, cluster, job, choice), get("ahp").traits(job, layout, choice)
            assert isinstance(found, Pricer)
            how = found.group.unit_pricer.how(traits, traits.context.ways[0], layout.context_parallel_degree)
            reason = needs_masks(graph, cluster.groups[0].device, job, layout, choice)
            assert how.by_lengths == (reason is None)
            assert (how.attention == "torch_flash2") == (reason is None)


def test_what_people_are_told(packed: ModelGraph) -> None:
    def lines(devices: str, layout: Parallelism, job: Job = PACKED) -> list[str]:
        return attention_words(packed, Cluster.parse(devices).groups, job, layout, EngineChoice())

    one = Parallelism()
    assert lines(ON_NVIDIA, one, PLAIN) == []
    [line] = lines(ON_NVIDIA, one)
    assert line.startswith("by the lengths of documents")
    [line] = lines("2xV100-SXM-32GB", one)
    assert line.startswith("with a mask [sequence, sequence]")
    assert line.endswith("this is V100-SXM-32GB")
    [line] = lines(ON_NVIDIA, RING)
    assert "because context_parallel_method is ring" in line
    mixed = [*Cluster.parse(ON_NVIDIA).groups, *Cluster.parse("2xV100-SXM-32GB").groups]
    first, second = attention_words(packed, mixed, PACKED, one, EngineChoice())
    assert first.startswith("on A100-SXM-80GB by the lengths")
    assert second.startswith("on V100-SXM-32GB with a mask")
