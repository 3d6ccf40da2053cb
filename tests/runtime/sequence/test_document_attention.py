"""Attention by the lengths of documents is that of the documents one by one, under every layout, and takes the place of masks where it may."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ahp.graph.blocks import find_blocks
from ahp.graph.call import Documents, call_model, logits_of
from ahp.graph.document_mask import documents_apart
from ahp.graph.document_starts import DocumentStarts, document_starts
from ahp.runtime.sequence.document_attention import DocumentAttention, bounds_of
from tests.marks import cases
from tests.runtime.graphs import no_kernels
from tests.runtime.models import BUILDERS
from tests.runtime.sequence.lengths import on_cpu
from tests.runtime.sequence.test_document_mask import (
    HELD_OUT,
    JOB,
    LAYOUTS,
    STEPS,
    WINDOWS,
    ZERO_3,
    documents,
    plain,
)
from tests.runtime.test_equality import assert_same_curve, world_size
from tests.runtime.workers import Pool
from tests.search.families import TRIES, build, families

MODELS_OF = {
    "one": ("gpt2", "windows of mistral", "family qwen3", WINDOWS, "family bert", "family opt"),
    "zero3-recompute": ("llama",),
    "zero3-selective": ("llama",),
    "tp": ("gpt2", WINDOWS),
    "sequence": ("llama", "family bert"),
    "1f1b": ("gpt2", WINDOWS),
    "all-to-all": ("llama", WINDOWS),
    "all-to-all+sequence": ("windows of gemma3_text",),
    "expert": ("family mixtral",),
}
BY_NAME = {
    **LAYOUTS,
    "zero3-selective": {**ZERO_3, "activation_checkpoint": "selective"},
    "all-to-all+sequence": {**LAYOUTS["all-to-all"], **LAYOUTS["sequence"]},
}
CASES = [(layout, model) for layout in MODELS_OF for model in MODELS_OF[layout]]
WIDE = {
    ("one", "family qwen3"), ("one", "family opt"), ("tp", "gpt2"), ("1f1b", "gpt2"), ("zero3-selective", "llama"),
    ("all-to-all+sequence", "windows of gemma3_text"),
}  # fmt: skip


def train(rank: int, world: int, model: str, layout: dict[str, Any], compiled: bool = False) -> dict[str, Any]:
    """In each worker, with what documents were kept apart by, and how often by lengths."""
    from ahp.runtime.parallel import parallelize

    with on_cpu() as counted, no_kernels() if compiled else nullcontext():
        plan = {"job": JOB, "parallelism": layout, "engine": {"compile": compiled}}
        parallel = parallelize(BUILDERS[model](), plan)
        results = [parallel.step(parallel.shard(documents(step))) for step in range(STEPS)]
        held_out = parallel.evaluate([parallel.shard(documents(HELD_OUT))])
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "held out": held_out,
        "reason": parallel.attention_reason,
        "calls": counted.calls,
    }


@pytest.mark.parametrize(("layout", "model"), cases(CASES, wide=WIDE))
def test_attention_by_lengths_is_that_of_documents_alone(pool: Pool, layout: str, model: str) -> None:
    results = pool.run(train, world_size(BY_NAME[layout]), model, BY_NAME[layout])
    for found in results:
        assert found["reason"].startswith("FlashAttention")
        assert found["calls"] > 0
        assert found["held out"] == pytest.approx(plain(model)["held out"], rel=1e-5)
    assert_same_curve(results[0], plain(model))


COMPILED = {
    "zero3": ("llama", {**ZERO_3}),
    "sequence": ("family bert", BY_NAME["sequence"]),
    "all-to-all": ("llama", BY_NAME["all-to-all"]),
    "1f1b-recompute": (WINDOWS, {**BY_NAME["1f1b"], "activation_checkpoint": "full"}),
    "zero3-selective": ("llama", BY_NAME["zero3-selective"]),
}


@pytest.mark.parametrize("case", cases(COMPILED, wide=set(COMPILED) - {"zero3"}))
def test_compiled_blocks_attend_by_lengths(pool: Pool, case: str) -> None:
    model, layout = COMPILED[case]
    for found in pool.run(train, world_size(layout), model, layout, True):
        assert_same_curve(found, plain(model))
        assert found["reason"].startswith("FlashAttention")


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("llama", LAYOUTS["ring"], "context_parallel_method is ring"),
        ("own", LAYOUTS["one"], "its forward takes no attention_mask"),
        ("windows of gemma2", LAYOUTS["one"], "its attention is not fused"),
    ],
)
def test_masks_stay_where_lengths_do_not_go(pool: Pool, model: str, layout: dict[str, Any], words: str) -> None:
    for found in pool.run(train, world_size(layout), model, layout):
        assert found["calls"] == 0
        assert words in found["reason"]
        assert found["losses"] == pytest.approx(plain(model)["losses"], rel=1e-5)


MOST_PARAMETERS = 20_000_000
PLACES = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
IDS = torch.arange(3, 3 + PLACES.numel()).view_as(PLACES)


def of_family(model_type: str) -> nn.Module | None:
    """A small model that keeps documents apart, None where there is none."""
    for more in TRIES:
        try:
            if sum(p.numel() for p in build(model_type, **more).parameters()) > MOST_PARAMETERS:
                return None  # of keys that the small sizes do not know
            model = build(model_type, device="cpu", **more).eval()
            with torch.no_grad():
                call_model(model, IDS, PLACES, documents_apart(model, 16))
            return model
        except Exception:
            continue
    return None


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_family_by_lengths(model_type: str) -> None:
    model = of_family(model_type)
    assert model is not None
    assert by_lengths(model) is None


@pytest.mark.wide
def test_every_family_by_lengths_or_with_masks() -> None:
    """hrm_text has attention outside of what is taken for its blocks: it must keep its masks."""
    models = {model_type: model for model_type in families() if (model := of_family(model_type)) is not None}
    reasons = {model_type: by_lengths(model) for model_type, model in models.items()}
    assert "outside of the blocks" in (reasons["hrm_text"] or "")
    assert sum(reason is None for reason in reasons.values()) > 50, reasons


def by_lengths(model: nn.Module) -> str | None:
    """Logits of packed documents by lengths are those of each document alone; or why masks stay."""
    found = document_starts(model, documents_apart(model, 16), 16)
    if not isinstance(found, DocumentStarts):
        return found
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    attention = DocumentAttention(found, rows=2)
    attention.make_room(PLACES)
    with torch.no_grad():
        alone = [
            logits_of(call_model(model, IDS[row : row + 1, start:end]))[0]
            for row, start, end in ((0, 0, 5), (0, 5, 8), (1, 0, 2), (1, 2, 8))
        ]
        for number, block in enumerate(find_blocks(model).blocks):
            attention.attend(block, number)
        with on_cpu() as counted:
            packed = logits_of(call_model(model, IDS, PLACES, attention.documents))
    assert counted.calls > 0
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat(alone), rtol=1e-3, atol=1e-3)
    return None


class Block(nn.Module):
    """Attention as ``how`` says, with heads of 8."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).unflatten(-1, (2, 8)).transpose(1, 2)
        if self.how == "unfused":
            attended = (q @ q.transpose(2, 3)).masked_fill(~mask, -1e9).softmax(-1) @ q
        elif self.how == "inverted":
            attended = F.scaled_dot_product_attention(q, q, q, attn_mask=~mask)
        elif self.how == "twice":
            attended = F.scaled_dot_product_attention(q, q, q, attn_mask=mask) + F.scaled_dot_product_attention(q, q, q)
        else:
            attended = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.1 * (self.how == "dropout"))
        return x + attended.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Takes whole masks, as transformers' do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(32, 16), nn.ModuleList(Block(how) for _ in range(2))

    def forward(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        order = torch.arange(ids.shape[1])
        mask = (order[:, None] >= order)[None, None]
        if attention_mask is not None:
            mask = attention_mask if attention_mask.dim() == 4 else mask & (attention_mask[:, None, None] == 1)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask)
        return x @ self.tokens.weight.T


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fused", None),
        ("unfused", r"computes with it \(aten.bitwise_not"),
        ("inverted", r"computes with it \(aten.bitwise_not"),
        ("twice", "attention has another mask"),
        ("dropout", "attention has dropout"),
    ],
)
def test_starts_are_handed_to_attention_that_reads_them_alone(how: str, reason: str | None) -> None:
    found = document_starts(Model(how), Documents(), 16)
    assert isinstance(found, DocumentStarts) if reason is None else re.search(reason, found), found  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_long_window_is_looked_for_in_the_config() -> None:
    model: Any = build("llama", max_position_embeddings=16384)
    model.config.sliding_window = 8192
    documents = documents_apart(model, 16)
    found = document_starts(model, documents, 12288)
    assert isinstance(found, str)
    assert "sliding_window 8192" in found
    assert isinstance(document_starts(model, documents, 8192), DocumentStarts)


def test_bounds_have_one_shape_whatever_the_documents() -> None:
    starts = torch.tensor([True, False, False, True, True, False])
    assert bounds_of(starts, 3).tolist() == [0, 3, 4, 6]
    assert bounds_of(starts, 4).tolist() == [0, 3, 4, 6, 6]
    assert bounds_of(starts, 8).dtype == torch.int32
    assert bounds_of(torch.tensor([True] * 4), 4).tolist() == [0, 1, 2, 3, 4]


def test_room_grows_and_does_not_shrink() -> None:
    found = document_starts(build("llama"), documents_apart(build("llama"), 16), 16)
    assert isinstance(found, DocumentStarts)
    attention = DocumentAttention(found, rows=2)
    attention.make_room(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert attention.room == 2
    attention.make_room(torch.tensor([[0, 0, 0], [5, 0, 1], [0, 1, 2], [0, 1, 2]]))
    assert attention.room == 8  # five documents in the first micro-batch; one began before it
    attention.make_room(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert attention.room == 8
