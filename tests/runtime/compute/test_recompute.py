"""Recompute changes what is kept, and nothing else."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ahp.engines.traits import Fusion, KernelTraits
from ahp.errors import BadInput
from ahp.forecast.activations import ActivationLiveness, SegmentMemory
from ahp.forecast.division import Division
from ahp.forecast.kernels import kernels
from ahp.forecast.selective import last_read
from ahp.forecast.split import is_weight_product, split
from ahp.graph.blocks import find_blocks
from ahp.graph.call import call_model, logits_of
from ahp.graph.host_numbers import Generators
from ahp.graph.operators import ModelGraph, Operator
from ahp.graph.trace import analyze
from ahp.job import Job
from ahp.runtime.compute import compile as compiled
from ahp.runtime.compute.compile import Forward, FullRecomputeCompiler, compile_block
from ahp.runtime.compute.recompute import recompute, saved_once
from tests.marks import cases
from tests.runtime.models import MODELS, batch

KINDS: tuple[Any, ...] = (None, "selective", "full")

DECOMPOSED = "aot_eager_decomp_partition"
"""torch.compile's backend that chooses what to keep as torch's own does, and makes no kernels."""


def gradients(model: nn.Module, kind: Any) -> dict[str, torch.Tensor]:
    if kind is not None:
        for block in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
            recompute(block, kind)
    torch.manual_seed(1)
    logits_of(call_model(model.train(), batch(0)["input_ids"])).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def dropping() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    assert config.resid_pdrop > 0
    assert config.attn_pdrop > 0
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("build", [MODELS["llama"], dropping], ids=["llama", "with dropout"])
def test_gradients_are_those_without(build: Any) -> None:
    expected, *others = (gradients(build(), kind) for kind in KINDS)
    for found in others:
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7)


CALLS: list[int] = []


class InParts(torch.autograd.Function):
    """The square of a matrix, from two products of which the second is added in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        def parts() -> tuple[torch.Tensor]:
            CALLS.append(1)
            half = x.shape[1] // 2
            total = x[:, :half] @ x[:half]
            return (total.add_(x[:, half:] @ x[half:]),)

        (out,) = saved_once(parts)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] @ x.T + x.T @ gradients[0]


class Squaring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.nn.functional.gelu(InParts.apply(self.enter(x))))


def test_selective_keeps_what_is_no_single_operator_as_one() -> None:
    found, runs = [], []
    for kind in KINDS:
        block, x = Squaring(), torch.ones(8, 8).tril().requires_grad_()
        if kind is not None:
            recompute(block, kind)
        CALLS.clear()
        block(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters())])
        runs.append(len(CALLS))
    assert runs == [1, 1, 2]
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-6, atol=1e-7)


class InPlace(nn.Module):
    """Writes into results of products, as experts with biases do, and ``nn.ReLU(inplace=True)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.bias = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.relu(self.enter(x), inplace=True)
        return self.leave(hidden).add_(self.bias).mul_(2.0).square()


class Drawing(nn.Module):
    """Draws results that are kept, and in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) + torch.rand(())
        masked = x * torch.empty_like(x).bernoulli_(0.5)
        return self.leave(torch.nn.functional.dropout(masked * torch.randn_like(x), 0.5))


class DrawingOnHost(Drawing):
    """Draws from Python's generator and NumPy's, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.enter(x) * (self.calls + random.random() + np.random.random())
        return self.leave(torch.nn.functional.gelu(x) if random.random() < 0.5 else x.square())


@pytest.mark.parametrize("build", [InPlace, Drawing, DrawingOnHost])
def test_a_block_of_its_own_kind_has_the_gradients_of_one_without(build: Callable[[], nn.Module]) -> None:
    found = []
    for kind in KINDS:
        block, x = build(), torch.eye(8).requires_grad_()
        if kind is not None:
            recompute(block, kind)
        torch.manual_seed(1)
        with Generators().seeded(1):
            for _ in range(3):
                block(x).square().sum().backward()
            found.append([x.grad, *(p.grad for p in block.parameters()), torch.tensor(random.random())])
        assert getattr(block, "calls", 3) == 3
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=0, atol=0)


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= 0.5
        return self.linear(x)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_a_block_that_changes_its_input_is_refused(kind: Any) -> None:
    """It would run again on what it made of it."""
    block = ChangesInput()
    recompute(block, kind)
    with pytest.raises(BadInput, match=rf"activation_checkpoint = '{kind}': a block changes a tensor that it is given"):
        block(torch.ones(2, 4, requires_grad=True) * 2)


def kept_bytes(
    kind: Any,
    model: str = "llama",
    compiler: Callable[[Forward], Forward] | None = None,
    positions: torch.Tensor | None = None,
) -> int:
    """What is allocated in a forward pass and still is after it."""
    model, blocks = built(model)
    for block in blocks:
        if compiler is not None:
            compile_block(block, compiler)
        elif kind is not None:
            recompute(block, kind)
    if compiler is not None:
        call_model(model, batch(0)["input_ids"])  # what compiling allocates is no matter
    gc.collect()  # what earlier models left, so that it is not freed in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        logits = logits_of(call_model(model, batch(0)["input_ids"], positions))
    assert logits.requires_grad
    return sum(event.self_cpu_memory_usage for event in run.key_averages())


@pytest.mark.slow
def test_selective_keeps_less_than_nothing_recomputed_and_more_than_full() -> None:
    none, selective, full = map(kept_bytes, KINDS)
    assert full < 0.8 * selective
    assert selective < 0.8 * none


def built(name: str) -> tuple[nn.Module, list[nn.Module]]:
    """A model and its blocks."""
    model = MODELS[name]()
    return model, list(find_blocks(model).blocks)


def traced(name: str, **job: Any) -> ModelGraph:
    rows, tokens = batch(0)["input_ids"].shape
    return analyze(built(name)[0], Job(sequence_length=tokens, precision="fp32", **job)).at(rows)


def memories(name: str, fusion: Fusion, tensor: int = 1, **job: Any) -> tuple[list[SegmentMemory], int]:
    """Of every layer, and bytes of what enters one."""
    graph = traced(name, **job)
    divisions = [Division(split(block, "block"), tensor) for block in graph.blocks]
    of_kinds = [
        ActivationLiveness(block, kernels(block, KernelTraits(fusion)), division.split).on(division)
        for block, division in zip(graph.blocks, divisions, strict=True)
    ]
    assert graph.blocks[0].output is not None
    return [of_kinds[kind] for kind in graph.layers], graph.blocks[0].output.bytes


@pytest.mark.slow
def test_selective_keeps_what_the_forecast_says() -> None:
    kept = sum(memory.beside_products.kept for memory in memories("llama", "traced")[0])
    assert kept_bytes("selective") - kept_bytes("full") == kept


@pytest.mark.slow
def test_masks_are_kept_as_the_forecast_says() -> None:
    rows, tokens = batch(0)["input_ids"].shape
    positions = torch.tensor([*range(5), *range(tokens - 5)]).expand(rows, tokens)
    layers, hidden = memories("llama", "traced", document_mask=True)
    everything, full = (kept_bytes(kind, positions=positions) for kind in (None, "full"))
    full -= len(layers) * torch.get_rng_state().nbytes
    # Each layer keeps the mask as numbers; the one that these are made of waits where a second run needs it.
    assert layers[0].masks == rows * tokens**2
    assert everything - full == sum(memory.saved - hidden for memory in layers) - layers[0].masks
    numbers = 4 * rows * tokens**2
    one, two = (memories("llama", "traced", tensor, document_mask=True)[0][0] for tensor in (1, 2))
    plain, plain_two = (memories("llama", "traced", tensor)[0][0] for tensor in (1, 2))
    assert plain.masks == 0
    keys = 2 * 2 * hidden // 4  # with a mask keys and values are repeated for their queries
    assert one.saved - plain.saved == numbers + keys
    assert two.saved - plain_two.saved == numbers + keys // 2  # every rank has the whole mask


@pytest.mark.slow
@pytest.mark.parametrize("model", cases(["llama", "gpt2"], fast=["llama"]))
def test_a_second_run_computes_what_the_forecast_says(model: str) -> None:
    flops = {}
    for kind in ("none", "full"):
        module, blocks = built(model)
        for block in blocks if kind == "full" else ():
            recompute(block, "full")
        with FlopCounterMode(display=False) as counter:
            logits_of(call_model(module, batch(0)["input_ids"])).sum().backward()
        counts = counter.get_flop_counts()["Global"]
        flops[kind] = sum(count for operator, count in counts.items() if "mm" in str(operator))
    graph = traced(model)
    products = [op for kind in graph.layers for op in graph.blocks[kind].phase("forward") if is_weight_product(op)]
    again = run_again(graph)
    assert len(again) == len(products) - len(graph.layers)  # the last one of each block is not
    assert flops["full"] - flops["none"] == sum(op.flops for op in again)


def run_again(graph: ModelGraph) -> list[Operator]:
    """Products with a weight that full recompute runs a second time, of all layers."""
    return [
        op
        for kind in graph.layers
        for op in graph.blocks[kind].phase("forward")
        if is_weight_product(op) and op.index <= last_read(graph.blocks[kind])
    ]


def compiled_products(model: str, compiler: Callable[[Forward], Forward]) -> int:
    """Products of two dims that one forward and backward of a model with compiled blocks runs."""
    torch._dynamo.reset()
    module, blocks = built(model)
    for block in blocks:
        compile_block(block, compiler)

    def step() -> None:
        logits_of(call_model(module, batch(0)["input_ids"])).sum().backward()

    step()  # compiles
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step()
    return sum(event.count for event in run.key_averages() if event.key in ("aten::mm", "aten::addmm"))


@pytest.mark.parametrize("model", cases(["llama", "gpt2"], wide=("gpt2",)))
def test_a_second_run_of_compiled_blocks_computes_what_the_forecast_says(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", DECOMPOSED)
    once, twice = (compiled_products(model, compiler) for compiler in (without_kernels, FullRecomputeCompiler()))
    assert twice - once == len(run_again(traced(model)))


def without_kernels(forward: Forward) -> Forward:
    return torch.compile(forward, dynamic=False, backend=DECOMPOSED)


@pytest.mark.parametrize("model", cases(["llama", "gpt2", "custom"], wide=("gpt2", "custom")))
def test_compiled_blocks_keep_what_the_forecast_says(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", DECOMPOSED)
    layers, hidden = memories(model, "fused")
    states = len(layers) * torch.get_rng_state().nbytes
    full = kept_bytes("full", model) - states
    torch._dynamo.reset()
    # Before torch 2.14 attention is run again with the generator's state, though it drops nothing.
    beside = states if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14) else 0
    assert kept_bytes("full", model, FullRecomputeCompiler()) - beside == pytest.approx(full, abs=128)
    torch._dynamo.reset()
    everything = kept_bytes("none", model, without_kernels) - full
    selective = kept_bytes("selective", model, compiled.selective_recompute_compiler()) - full
    # 128 bytes are positions, which a checkpoint keeps, or a mask's seed.
    assert selective == pytest.approx(sum(memory.beside_products.kept for memory in layers), abs=128)
    assert everything == pytest.approx(sum(memory.saved - hidden for memory in layers), abs=128)
    assert selective < 0.9 * kept_bytes("selective", model) - full
