"""Compiled blocks compute what the eager ones do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from ahp.errors import AhpError, BadInput, HardwareMismatch
from ahp.graph.blocks import find_blocks
from ahp.graph.call import call_model, logits_of
from ahp.job import Job
from ahp.runtime import device_limits
from ahp.runtime.compute import compile as compiled
from ahp.runtime.compute.compile import compile_block
from ahp.runtime.compute.one_graph import why_several_graphs
from ahp.runtime.compute.recompute import recompute
from ahp.runtime.compute.uncompiled import uncompiled
from ahp.runtime.device_limits import CPU_COMPILERS, refuse_without_compiler
from tests.graph.small import custom, two_graphs
from tests.marks import cases, skip_where_slices_do_not_compile
from tests.runtime.averages import averaging
from tests.runtime.compute.test_fp8 import needs_torchao
from tests.runtime.experts import test_dispatch as test_experts
from tests.runtime.graphs import no_kernels
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import PIPELINE, SPLIT, ZERO, assert_same_curve, world_size
from tests.runtime.test_families import FAMILIES, family
from tests.runtime.workers import Pool

STEPS, FEWER_STEPS = 10, 3


def train(
    rank: int, world: int, layout: dict[str, Any], model: str = "llama", steps: int = STEPS, compiled: bool = True
) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    torch._dynamo.reset()  # of what the worker compiled before
    plan = {"job": JOB, "parallelism": layout, "engine": {"compile": compiled}}
    parallel, results, graphs = parallelize(BUILDERS[model](), plan), [], []
    counters.clear()  # also of a look at the blocks without data
    for step in range(steps):
        results.append(parallel.step(parallel.shard(batch(step))))
        graphs.append(counters["stats"]["unique_graphs"])
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "graphs": graphs,
        "operators": counters["stats"]["calls_captured"],
        "breaks": list(counters["graph_break"]),
    }


@pytest.mark.wide  # tests/runtime/test_products.py has kernels that equal one process under another layout
@pytest.mark.skipif(not any(map(shutil.which, CPU_COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_blocks_equal_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]]) -> None:
    """Under one layout: compiling takes half a minute, and a pipeline's stage or a recomputed block is the same graph."""
    layout = ZERO["zero3"]
    for found in pool.run(train, world_size(layout), layout):
        assert found["graphs"][-1] > 0, "nothing was compiled"
        assert_same_curve(found, plain_run("llama", STEPS))


def train_without_kernels(rank: int, world: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Everything but the compiler of kernels, which takes long."""
    with no_kernels():
        return train(rank, world, *args, **kwargs)


RING = {"context_parallel_degree": 2, "context_parallel_method": "ring"}
HEADS = {"context_parallel_degree": 2, "context_parallel_method": "all-to-all"}
TENSOR = {"tensor_parallel_degree": 2, "micro_batch_size": 4}
SEQUENCE = {**TENSOR, "enable_sequence_parallel": True}
FULL, SELECTIVE = ({"activation_checkpoint": kind} for kind in ("full", "selective"))
EXPERTS = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 4}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "zero3-x-tp-recompute": ("llama", {**ZERO["zero3"], **TENSOR, "micro_batch_size": 2, **FULL}, 1),
    "sequence": ("gpt2", SEQUENCE, 1),
    "all-to-all-x-sequence": ("llama", {**HEADS, **SEQUENCE}, 1),
    "all-to-all-1f1b-recompute": ("llama", {**HEADS, **PIPELINE["1f1b"], **FULL, "micro_batch_size": 4}, 1),
    "ring": ("llama", {**RING, "micro_batch_size": 4}, 5),
    "ring-x-tp": ("llama", {**RING, **TENSOR}, 2),
    "zero0": ("llama", {**ZERO["zero0"], "micro_batch_size": 2}, 1),
    "experts": ("family mixtral", {**EXPERTS, **FULL}, 4),
    "experts-x-sequence": ("family mixtral", {**EXPERTS, **SEQUENCE, "zero_stage": 1}, 2),
    "shared-experts-x-tp": ("family deepseek_v3", {**EXPERTS, **TENSOR, "zero_stage": 1}, 3),
    "shared-experts-x-sequence": ("family deepseek_v3", {**EXPERTS, **SEQUENCE}, 3),
    "mixture-x-tp": ("family qwen3_moe", TENSOR, 1),
    "zero3-x-sequence-selective": ("gpt2", {**ZERO["zero3"], **SEQUENCE, "micro_batch_size": 2, **SELECTIVE}, 1),
    "all-to-all-1f1b-some-selective": (
        "llama", {**HEADS, **PIPELINE["1f1b"], **SELECTIVE, "recomputed_layers_per_stage": (2, 1), "micro_batch_size": 4}, 2
    ),
    "zero3-x-zbv-recompute": ("llama", {**ZERO["zero3"], **SPLIT["zbv"], **FULL, "micro_batch_size": 1}, 2),
    "sequence-x-interleaved-zero-bubble-selective": (
        "gpt2", {**SEQUENCE, **SPLIT["interleaved-zero-bubble"], **SELECTIVE, "micro_batch_size": 2}, 2
    ),
    "dual-pipe-v": ("llama", {**SPLIT["dual-pipe-v"], "micro_batch_size": 1}, 2),
    "ring-x-zbv": ("llama", {**RING, **SPLIT["zbv"], "micro_batch_size": 2}, 10),
}  # fmt: skip
"""The model, the layout, and in how many graphs a block comes: more than one where something stays outside, or where some blocks
keep less than others, or where a rank has two stages whose weights wait apart."""
WIDE = (
    "sequence-x-interleaved-zero-bubble-selective",
    "all-to-all-1f1b-some-selective",
    "dual-pipe-v",
    "zero3-x-zbv-recompute",
    "ring-x-zbv",
    "sequence",
    "ring-x-tp",
    "shared-experts-x-tp",
    "zero3-x-tp-recompute",
    "all-to-all-1f1b-recompute",
    "all-to-all-x-sequence",
    "experts-x-sequence",
    "shared-experts-x-sequence",
    "zero3-x-sequence-selective",
)
"""In other products, part by part."""
BUILDERS.update({name: build for name, build in test_experts.BUILDERS.items() if name.startswith("family")})


@pytest.mark.parametrize("case", cases(CASES, wide=WIDE))
def test_compiled_products_equal_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]], case: str) -> None:
    model, layout, pieces = CASES[case]
    skip_where_slices_do_not_compile(layout)
    for found in pool.run(train_without_kernels, world_size(layout), layout, model, FEWER_STEPS):
        assert_same_curve(found, plain_run(model, FEWER_STEPS))
        assert found["operators"] > 40, "what was compiled is not a block"
        assert found["graphs"] == [pieces] * FEWER_STEPS, "compiled more than once, or not in as many parts"
        outside = layout.get("context_parallel_method") == "ring" or "expert_parallel_degree" in layout
        assert bool(found["breaks"]) == outside, found["breaks"]


@pytest.mark.parametrize("name", cases(FAMILIES, wide=set(FAMILIES) - {"gemma3_text"}))
def test_blocks_of_a_family_are_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    model = family(name)
    for block in find_blocks(model).blocks:
        compile_block(block)
    for step in range(2):
        logits_of(call_model(model.train(), batch(step)["input_ids"])).sum().backward()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def kept_and_gradients(model: nn.Module, *, compile_: bool, selective: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that its forward allocates and keeps, of which a graph tells the most, and the gradients."""
    torch._dynamo.reset()
    with no_kernels():
        for block in find_blocks(model).blocks:
            if compile_:
                compile_block(block, compiled.selective_recompute_compiler() if selective else compiled.compiled)
            elif selective:
                recompute(block, "selective")
        ids = batch(0)["input_ids"]
        torch.manual_seed(1)
        logits_of(call_model(model.train(), ids)).square().sum().backward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            logits = logits_of(call_model(model, ids))
    assert logits.requires_grad
    kept = sum(event.self_cpu_memory_usage for event in run.key_averages())
    return kept, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "dropping"])
def test_a_compiled_block_keeps_its_products_alone(model: str) -> None:
    """Less than the compiler by itself, and less than uncompiled blocks, which keep more copies beside the same products. What is
    dropped is dropped again."""
    ways = [(False, False), (False, True), (True, False), (True, True)]
    (_, expected), *others = (
        kept_and_gradients(BUILDERS[model](), compile_=compile_, selective=selective) for compile_, selective in ways
    )
    uncompiled_ones, by_itself, both = (kept for kept, _ in others)
    if (
        model == "llama"
    ):  # where random numbers are drawn again, the generator's states are kept, more than so small a model's dropout
        assert both < uncompiled_ones
    assert both < 0.95 * by_itself
    for _, found in others:
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7)


@uncompiled
def outside(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Broken(nn.Module):
    """A block of which something stays outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * outside(x)


class Branching(nn.Module):
    """A block that reads a number of its own on the host; torch has an error of another kind for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x + 1) if x.sum().item() > 0 else x


@pytest.mark.parametrize(("kind", "told"), [(Broken, ""), (Branching, "known only when it runs")])
def test_a_block_of_several_graphs_does_not_keep_its_products_alone(kind: type[nn.Module], told: str) -> None:
    block = kind()
    compile_block(block, compiled.selective_recompute_compiler())
    with pytest.raises(
        BadInput,
        match=rf"activation_checkpoint = 'selective': .*one graph.*{told}.*\(valid: none, full; or engine.compile false\)",
    ):
        block(torch.ones(2, requires_grad=True))


def test_blocks_of_several_graphs_are_found_without_data() -> None:
    job = Job(sequence_length=8, precision="fp32")
    assert why_several_graphs(custom(), job) is None
    found = why_several_graphs(two_graphs(), job)
    assert found is not None
    assert "torch.compiler.disable" in found
    assert why_several_graphs(averaging("in place"), job) == "it writes into its buffers or its input"


def test_a_layout_that_needs_one_graph_is_refused_before_its_first_step(pool: Pool) -> None:
    (told,) = pool.run(refused_layout, 1)
    assert "activation_checkpoint = 'selective': with engine.compile = True a block must be one graph" in told
    assert "torch.compiler.disable" in told


def refused_layout(rank: int, world: int) -> str:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    layout = {"micro_batch_size": 4, "activation_checkpoint": "selective"}
    with pytest.raises(BadInput) as refused:
        parallelize(two_graphs(), {"job": JOB, "parallelism": layout, "engine": {"compile": True}})
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", [compiled.compiled, compiled.selective_recompute_compiler()], ids=["none", "selective"]
)
def test_blocks_that_train_other_weights_and_sequences_of_other_lengths_have_graphs_of_their_own(compiler: Any) -> None:
    """torch's own limit is eight graphs of the same code: the ninth is no graph, or an error."""
    blocks = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(12)]
    for number, block in enumerate(blocks):
        for place, layer in enumerate(block):
            layer.requires_grad_(bool(number + 1 >> place & 1))
    with no_kernels() as counted:
        for block in blocks:
            compile_block(block, compiler)
            block(torch.ones(2, 4)).sum().backward()
        for length in range(3, 8):
            blocks[0](torch.ones(length, 4)).sum().backward()
        assert counted["unique_graphs"] == 12 + 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", [compiled.FullRecomputeCompiler(), compiled.selective_recompute_compiler()], ids=["full", "selective"]
)
def test_a_compiled_block_that_trains_nothing_runs_as_it_is(compiler: Any) -> None:
    """Nothing goes back through it, where what comes before trains nothing either: there is nothing to compute again."""
    model = BUILDERS["llama"]().train()
    ids = batch(0)["input_ids"]
    expected = logits_of(call_model(model, ids))
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    with no_kernels() as counted:
        for block in find_blocks(model).blocks:
            compile_block(block, compiler)
        logits = logits_of(call_model(model, ids))
        logits.sum().backward()
        assert counted["unique_graphs"] == 3  # trained or not, behind something trained or not
    torch.testing.assert_close(logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Broken, Branching])
def test_blocks_of_several_graphs_are_run_again_from_outside(kind: type[nn.Module]) -> None:
    """Two alike: what the first one tells holds for both, and neither keeps more than what enters it."""
    keeping, blocks = compiled.FullRecomputeCompiler(), [kind(), kind()]
    with no_kernels():
        for block in blocks:
            compile_block(block, keeping)
            keeping.recompute_outside(block)
        x = torch.tensor([2.0], requires_grad=True)
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = nn.Sequential(*blocks)(x)
        y.backward()
    assert not keeping.one_graph
    assert y.item() == 6 * 7
    assert x.grad == 13 * 5  # dy/dx of (x^2 + x) twice
    assert sum(t.numel() for t in kept) == 2


def why_refused(rank: int, world: int, model: str, layout: dict[str, Any]) -> str:
    from ahp.runtime.parallel import parallelize

    with pytest.raises(AhpError) as refused:
        parallelize(
            BUILDERS[model](), {"job": JOB, "parallelism": {**layout, **SELECTIVE}, "engine": {"compile": True}}
        )
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "layout", "told"),
    [
        ("dropping", TENSOR, "dropout of a tensor"),
        ("odd", {"context_parallel_degree": 2}, "does not divide the attention heads"),
    ],
)
def test_what_stays_outside_of_graphs_is_refused(pool: Pool, model: str, layout: dict[str, Any], told: str) -> None:
    skip_where_slices_do_not_compile(layout)
    for message in pool.run(why_refused, 2, model, layout):
        assert told in message
        assert message.startswith("activation_checkpoint = 'selective'")


def odd() -> nn.Module:
    """Three heads, which two ranks do not divide."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_positions=64,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        )
    )


BUILDERS["odd"] = odd


def dropping() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=64))


BUILDERS["dropping"] = dropping


def test_compiled_slices_drop_what_uncompiled_ones_do(pool: Pool) -> None:
    """Attention drops parts by each rank's own numbers, the rest of the block the same on every rank."""
    skip_where_slices_do_not_compile(TENSOR)
    for expected, found in zip(
        *(pool.run(train_without_kernels, 2, TENSOR, "dropping", FEWER_STEPS, c) for c in (False, True)), strict=True
    ):
        assert_same_curve(found, expected)
        assert found["graphs"][0] == found["graphs"][-1] > 0, "compiled again after the first step"
        assert not expected["operators"]


@needs_torchao
def test_blocks_in_8_bits_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles the same code no more than eight times, and then leaves it as it is."""
    from ahp.runtime.compute.fp8 import Fp8

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(10)]
    for block in blocks:
        Fp8().convert(block)
        compile_block(block)
    nn.Sequential(*blocks)(torch.ones(16, 16, requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_a_host_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(device_limits, "find_spec", lambda name: name)
    monkeypatch.setattr(device_limits.shutil, "which", lambda name: None if name == "no-such-compiler" else name)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(HardwareMismatch, match=r"engine.compile = True.*no-such-compiler"):
        refuse_without_compiler(cpu)
    refuse_without_compiler(gpu)  # on which torch writes no C++
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setenv("CC", "no-such-compiler")
    refuse_without_compiler(cpu)
    with pytest.raises(HardwareMismatch, match=r"Triton calls, and there is no no-such-compiler"):
        refuse_without_compiler(gpu)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(device_limits, "find_spec", lambda name: None)
    refuse_without_compiler(cpu)
    with pytest.raises(HardwareMismatch, match=r"the package triton .*not installed"):
        refuse_without_compiler(gpu)
