"""Bytes saved for backward: what autograd really keeps on real tensors, to the byte; and the formulas for LLaMA."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from ahp.graph.fake_run import next_token_loss
from ahp.graph.models import build_model, is_masked
from ahp.graph.trace import analyze
from ahp.job import Job
from tests.graph.small import CONFIGS, SEQUENCE, VOCABULARY, Custom, marked, traced
from tests.marks import cases

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def really_saved(module: nn.Module, batch: int) -> int:
    """Bytes of the distinct storages that autograd packs, those of parameters and buffers left out."""
    kept = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            seen[storage.data_ptr()] = storage
        return tensor

    input_ids, labels = (torch.randint(0, VOCABULARY, (batch, SEQUENCE)) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if is_masked(module):
            # BERT's own loss stays in bf16; AHP computes every loss in fp32.
            loss = next_token_loss(module(input_ids).logits, labels, shift=False)
        elif hasattr(module, "config"):
            loss = module(input_ids, labels=labels).loss
        else:
            loss = next_token_loss(module(input_ids)[0], labels, shift=True)
    loss.backward()
    return sum(storage.nbytes() for storage in seen.values())


def saved(model: Any, precision: str, **more: Any) -> int:
    graph = analyze(model, {"sequence_length": SEQUENCE, "precision": precision}, **more)
    return sum(part.saved_bytes for part in graph.segments())


EVERY_FAMILY = [marked(name, "fp32", "flash", 2) for name in CONFIGS] + [
    pytest.param(name, "bf16", "math", 2, marks=pytest.mark.slow) for name in CONFIGS
]
WAYS = [*product(DTYPES, ("flash", "math"), (1, 3))]
EVERY_WAY = [
    pytest.param("llama", *way, marks=[] if way[:2] == ("bf16", "flash") else pytest.mark.slow) for way in WAYS
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "attention", "batch"), EVERY_FAMILY + EVERY_WAY)
def test_saved_bytes_are_what_autograd_saves(name: str, precision: str, attention: str, batch: int) -> None:
    torch.manual_seed(0)
    real = build_model(CONFIGS[name], dtype=DTYPES[precision], device="cpu", attention=attention).train()
    expected = really_saved(real, batch)
    if name == "mixtral" and precision == "fp32":
        expected -= 3 * 4 * 4  # transformers' fp32 operator does not save the offsets: 4 experts, int32, in 3 layers
    graph = traced(name, precision, attention=attention).at(batch)
    assert sum(part.saved_bytes for part in graph.segments()) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_bytes_of_a_module_of_ones_own(precision: str) -> None:
    module = Custom().to(DTYPES[precision])
    assert saved(module, precision) == really_saved(module, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["llama3-8b", "llama-7b"], fast=["llama-7b"]))
def test_llama_saves_what_its_operators_need(name: str) -> None:
    """A block of transformers' LLaMA, eager, bf16, bytes a token; h wide, f inner, a heads, k heads for keys.

    Each norm: its input in fp32 (4h), the inverse deviation (4), the result before and after the weight (2h + 2h).
    Attention: rotated Q (2h), rotated K and V (4hk/a), the result (2h), log-sum-exp in fp32 (4a).
    SwiGLU: gate, silu of it, up, their product (8f).
    """
    s = 512
    graph = analyze(name, Job(sequence_length=s))
    h, f, a, k = (graph.config[key] for key in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))  # fmt: skip
    exact = s * (2 * (8 * h + 4) + 4 * h + 4 * h * k // a + 4 * a + 8 * f)
    block = graph.blocks[0].saved_bytes
    assert block == exact
    # Against the formula for fused kernels, A = s (12h + 4hk/a + 4a + 6f): eager keeps the norms' fp32 input, twice 2h
    # more, the tensor before the weight, twice 2h more, and silu(gate), 2f more.
    fused = s * (12 * h + 4 * h * k // a + 4 * a + 6 * f)
    assert block - fused == s * (8 * h + 2 * f + 8)
    assert 1.3 < block / fused < 1.5


@pytest.mark.slow
def test_fused_attention_keeps_no_scores_whatever_the_dropout() -> None:
    dropped = CONFIGS["gpt2"] | {"attn_pdrop": 0.1}
    assert saved(dropped, "bf16") == saved(CONFIGS["gpt2"], "bf16")
    assert saved(dropped, "bf16", attention="math") > saved(CONFIGS["gpt2"], "bf16", attention="math")
