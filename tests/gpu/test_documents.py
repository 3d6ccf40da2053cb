"""Packed documents on a GPU: FlashAttention by their lengths beside documents written out, and beside masks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from ahp.runtime.sequence import document_attention
from ahp.runtime.sequence.document_attention import bounds_of
from ahp.runtime.torch_compat import attention_of_lengths
from tests.runtime.sequence.lengths import ALL, operator
from tests.runtime.sequence.test_ring_kernels import HALF

LENGTHS = (5, 130, 1, 300, 76)
WINDOWS = {"causal": (None, 0), "whole": (None, None), "back": (20, 0), "both": (16, 16)}
MODEL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
JOB = {
    "sequence_length": 2048, "global_batch_size": 4, "steps": 10, "precision": "bf16", "document_mask": True,
    "optimizer": {"warmup_steps": 1},
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_kernel_attends_within_documents(
    window: str, width: int, key_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    starts = torch.zeros(tokens, dtype=torch.bool, device=device)
    starts[torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)] = True
    bounds = bounds_of(starts, 8)  # with room for three more
    q, k, v, gradient = (
        torch.randn(tokens, heads, width, device=device).to(dtype) for heads in (4, key_heads, key_heads, 4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention_of_lengths(q, k, v, bounds, tokens, WINDOWS[window], 0.2)
    found = [out, *torch.autograd.grad(out, inputs, gradient)]
    whole = [x.detach().float().requires_grad_() for x in inputs]
    before, after = (ALL if size is None else size for size in WINDOWS[window])
    expected_out = operator(*whole, bounds, before, after, 0.2)
    expected = [expected_out, *torch.autograd.grad(expected_out, whole, gradient.float())]
    for name, one, other in zip(("out", "of q", "of k", "of v"), found, expected, strict=True):
        off = (one.float() - other).norm() / other.norm()
        assert off < HALF[dtype], f"{name} is off by {off:.1e}"


def places(rows: int, length: int, mean: int) -> torch.Tensor:
    """Of each token the place in its document; documents of ``mean`` tokens on average."""
    starts = torch.rand(rows, length, generator=torch.Generator().manual_seed(3)) < 1 / mean
    order = torch.arange(length)
    return order - (order * starts).cummax(1).values


def steps(layout: dict[str, Any], engine: dict[str, Any], *, masks: bool, num_steps: int = 3) -> dict[str, Any]:
    """Losses and norms of a few steps, what documents were kept apart by, and the most memory that was allocated."""
    from ahp.graph.models import build_model
    from ahp.runtime.parallel import parallelize

    torch.manual_seed(0)
    rule = mock.patch.object(document_attention, "_needs_masks_on", return_value="it is compared with")
    torch.cuda.reset_peak_memory_stats()
    with rule if masks else nullcontext():
        parallel = parallelize(build_model(MODEL, device="cpu"), {"job": JOB, "parallelism": layout, "engine": engine})
    ids = torch.randint(512, (4, 2048), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": places(4, 2048, 300)}
    results = [parallel.step(parallel.shard(batch)) for _ in range(num_steps)]
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "reason": parallel.attention_reason,
        "bytes": torch.cuda.max_memory_allocated(),
    }


@pytest.mark.parametrize("engine", [{}, {"compile": True}], ids=["eager", "compiled"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_steps_by_lengths_equal_steps_with_masks(recompute: str, engine: dict[str, Any], alone: torch.device) -> None:
    """In bf16, so to its precision: gradients of two kernels differ in their last bits."""
    layout = {"micro_batch_size": 2, "activation_checkpoint": recompute}
    by_lengths, with_masks = (steps(layout, engine, masks=masks) for masks in (False, True))
    assert by_lengths["reason"].startswith("FlashAttention")
    assert with_masks["reason"].startswith("masks")
    assert by_lengths["losses"] == pytest.approx(with_masks["losses"], rel=2e-3)
    assert by_lengths["norms"] == pytest.approx(with_masks["norms"], rel=2e-2)


def test_no_mask_lies_in_memory(alone: torch.device) -> None:
    """A mask is S x S bytes, and in every layer twice as many as numbers: 2 rows x 4 layers x 2048 x 2048 x 2 bytes."""
    layout = {"micro_batch_size": 2}
    by_lengths, with_masks = (steps(layout, {}, masks=masks, num_steps=1)["bytes"] for masks in (False, True))
    assert with_masks - by_lengths > 2 * 4 * 2048**2
