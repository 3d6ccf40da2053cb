"""Recompute changes what is kept, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ahp.forecast.division import Division
from ahp.forecast.kernels import kernels
from ahp.forecast.memory import segment_memory
from ahp.forecast.split import split
from ahp.graph.call import call_model, logits_of
from ahp.graph.trace import analyze
from ahp.job import Job
from ahp.runtime.recompute import recompute
from tests.runtime.models import MODELS, batch

KINDS: tuple[Any, ...] = (None, "selective", "full")


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


def kept_bytes(kind: Any) -> int:
    """What is allocated in a forward pass and still is after it."""
    model = MODELS["llama"]()
    if kind is not None:
        for block in model.get_submodule("model.layers").children():
            recompute(block, kind)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        logits = logits_of(call_model(model, batch(0)["input_ids"]))
    assert logits.requires_grad
    return sum(event.self_cpu_memory_usage for event in run.key_averages())


def test_selective_keeps_less_than_nothing_recomputed_and_more_than_full() -> None:
    none, selective, full = map(kept_bytes, KINDS)
    assert full < 0.8 * selective
    assert selective < 0.8 * none


def test_selective_keeps_what_the_forecast_says() -> None:
    model, (rows, tokens) = MODELS["llama"](), batch(0)["input_ids"].shape
    graph = analyze(model, Job(sequence_length=tokens, precision="fp32")).at(rows)
    of_kinds = [
        segment_memory(block, kernels(block, "traced"), Division(split(block, "block"))).beside_products.kept
        for block in graph.blocks
    ]
    kept = sum(of_kinds[kind] for kind in graph.layers)
    assert kept_bytes("selective") - kept_bytes("full") == kept
