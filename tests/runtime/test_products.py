"""Products of techniques that no other test has: the curve of one process, in the precision of the job."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest
import torch

from ahp.runtime.device_limits import CPU_COMPILERS
from tests.marks import cases, skip_where_slices_do_not_compile
from tests.runtime.draws import OVERFLOWING, experts, gpt2, llama
from tests.runtime.graphs import no_kernels
from tests.runtime.restarts import STEPS, TOLERANCES, Restart, run
from tests.runtime.test_equality import world_size
from tests.runtime.workers import Pool

LLAMA = partial(llama, num_key_value_heads=2, tie_word_embeddings=False)
TIED = partial(gpt2, 0.0)
DROPPING = partial(gpt2, 0.1)
MIXTRAL = partial(experts, "mixtral", num_local_experts=4)
BALANCED = partial(experts, "mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)

REPLICAS = {"data_parallel_replicate_degree": 2}
SHARDS = {"data_parallel_shard_degree": 2}
EXPERTS = {**SHARDS, "expert_parallel_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
SEQUENCE = {**TENSOR, "enable_sequence_parallel": True}
RING = {"context_parallel_degree": 2, "context_parallel_method": "ring"}
HEADS = {"context_parallel_degree": 2, "context_parallel_method": "all-to-all"}
PIPELINE = {"pipeline_parallel_degree": 2}
ZBV = {**PIPELINE, "pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2}
FP16 = {"precision": "fp16"}
FULL, SELECTIVE = ({"activation_checkpoint": kind} for kind in ("full", "selective"))

SOME = 4
"""Steps of the job that are made: the first two warm up."""


def product(build: partial[Any], layout: dict[str, Any], **more: Any) -> Restart:
    """Two sequences at a time, on one process too: a micro-batch has a balance loss of its own."""
    return Restart(build, {"micro_batch_size": 2}, {"micro_batch_size": 2, **layout}, stop=STEPS, **more)


PRODUCTS = {
    "fp16-ring": product(LLAMA, RING, job=FP16),
    "fp16-heads-x-zero3": product(LLAMA, {**HEADS, **SHARDS}, job=FP16),
    "fp16-experts": product(MIXTRAL, EXPERTS, job=FP16),
    "fp16-experts-x-ring": product(MIXTRAL, {**EXPERTS, **RING}, job=FP16),
    "fp16-overflow-experts": product(MIXTRAL, EXPERTS, job=FP16, loss_scale=OVERFLOWING),
    "uneven-experts": product(MIXTRAL, {**REPLICAS, **EXPERTS, "micro_batches_per_replica": [2, 1]}),
    "uneven-ring": product(LLAMA, {**REPLICAS, **RING, "micro_batches_per_replica": [5, 1]}),
    "uneven-heads-zero1": product(LLAMA, {**REPLICAS, **HEADS, "zero_stage": 1, "micro_batches_per_replica": [2, 4]}),
    "uneven-tp": product(LLAMA, {**REPLICAS, **TENSOR, "micro_batches_per_replica": [1, 5]}),
    "uneven-sequence-x-zero3": product(
        LLAMA, {**REPLICAS, **SHARDS, **SEQUENCE, "micro_batches_per_replica": [1, 2]}
    ),
    "chunks-fp16-1f1b-tied": product(TIED, PIPELINE, job=FP16, engine={"loss_chunk_tokens": 7}),
    "chunks-fp16-zbv-tied": product(TIED, {**ZBV, **SHARDS}, job=FP16, engine={"loss_chunk_tokens": 5}),
    "chunks-fp16-tp-x-1f1b-tied": product(TIED, {**TENSOR, **PIPELINE}, job=FP16, engine={"loss_chunk_tokens": 7}),
    "balance-tp-x-ring-x-1f1b": product(BALANCED, {**SEQUENCE, **RING, **PIPELINE}),
    "balance-tp-x-heads-x-zbv": product(partial(BALANCED, num_attention_heads=4), {**TENSOR, **HEADS, **ZBV, **FULL}),
}  # fmt: skip
WIDE = (
    "fp16-heads-x-zero3", "fp16-experts-x-ring", "uneven-heads-zero1", "chunks-fp16-tp-x-1f1b-tied", "balance-tp-x-heads-x-zbv",
    "fp16-overflow-experts", "uneven-sequence-x-zero3", "balance-tp-x-ring-x-1f1b",
)  # fmt: skip


def train_with_engine(rank: int, world: int, restart: Restart, layout: dict[str, Any]) -> dict[str, Any]:
    """A model with dropout draws other numbers under another layout; compiled, it draws what it draws uncompiled."""
    if not restart.engine.get("compile"):
        return run(rank, world, restart, layout, 0, SOME, "", "")
    with no_kernels() as stats:
        return {**run(rank, world, restart, layout, 0, SOME, "", ""), "graphs": stats["unique_graphs"]}


def curve(pool: Pool, restart: Restart, layout: dict[str, Any]) -> dict[str, Any]:
    results = pool.run(train_with_engine, world_size(layout), restart, layout)
    assert "refused" not in results[0], results[0]["refused"]
    for key in ("losses", "norms", "skipped"):
        assert all(result[key] == results[0][key] for result in results), "ranks disagree"
    return results[0]


def assert_same(found: dict[str, Any], expected: dict[str, Any], precision: str) -> None:
    assert found["skipped"] == expected["skipped"]
    first, last = TOLERANCES[precision]
    for key in ("losses", "norms"):
        for step, (a, b) in enumerate(zip(found[key], expected[key], strict=True)):
            if b is not None:
                assert a == pytest.approx(b, rel=first + (last - first) * step / (STEPS - 1)), f"{key}, step {step}"


@pytest.mark.parametrize("name", cases(PRODUCTS, wide=WIDE))
def test_products_equal_one_process(pool: Pool, name: str) -> None:
    restart = PRODUCTS[name]
    alone = Restart(restart.build, {}, {}, STEPS, job=restart.job, loss_scale=restart.loss_scale)
    expected = curve(pool, alone, restart.first)
    assert any(expected["skipped"]) == (restart.loss_scale is not None)
    assert_same(curve(pool, restart, restart.then), expected, restart.precision)


@pytest.mark.skipif(not any(map(shutil.which, CPU_COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    "layout",
    cases(
        [PIPELINE, {**PIPELINE, **FULL}, {**ZBV, **SELECTIVE}, {**ZBV, **FULL}],
        wide=[PIPELINE, {**PIPELINE, **FULL}, {**ZBV, **FULL}],
    ),
    ids=["1f1b", "1f1b-full", "zbv-selective", "zbv-full"],
)
def test_compiled_stages_drop_what_uncompiled_ones_do(pool: Pool, layout: dict[str, Any]) -> None:
    eager = product(DROPPING, layout)
    compiled = product(DROPPING, layout, engine={"compile": True})
    expected, found = curve(pool, eager, eager.then), curve(pool, compiled, compiled.then)
    assert found["graphs"] > 0, "nothing was compiled"
    assert_same(found, expected, "fp32")
    assert expected["losses"] != curve(pool, product(TIED, layout), eager.then)["losses"], "nothing was dropped"


KERNELS = {
    "tp-gpt2": (TIED, TENSOR, {}),
    "1f1b-full-llama": (LLAMA, {**PIPELINE, **FULL}, {}),
    "selective-chunks-llama": (LLAMA, SELECTIVE, {"loss_chunk_tokens": 7}),
    "experts-mixtral": (MIXTRAL, EXPERTS, {}),
}


def train_on_kernels(rank: int, world: int, restart: Restart, layout: dict[str, Any]) -> dict[str, Any]:
    """With what torch compiles for processor cores."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    found = run(rank, world, restart, layout, 0, SOME, "", "")
    return {**found, "graphs": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]}


@pytest.mark.skipif(not any(map(shutil.which, CPU_COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("name", cases(KERNELS, wide=("selective-chunks-llama", "experts-mixtral", "1f1b-full-llama")))
def test_compiled_kernels_equal_one_process(pool: Pool, name: str) -> None:
    build, layout, engine = KERNELS[name]
    skip_where_slices_do_not_compile(layout)
    expected = curve(pool, product(build, {}), {"micro_batch_size": 2})
    restart = product(build, layout, engine={"compile": True, **engine})
    for found in pool.run(train_on_kernels, world_size(layout), restart, restart.then):
        assert "refused" not in found, found["refused"]
        assert found["graphs"] > 0, "nothing was compiled"
        assert_same(found, expected, "fp32")
