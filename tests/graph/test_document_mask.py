"""Models that do not keep documents apart are told before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph import document_mask
from ahp.graph.call import BIDIRECTIONAL, CAUSAL, Documents, Sight, call_model, logits_of
from ahp.graph.document_mask import Probe, documents_apart
from ahp.graph.trace import analyze
from tests.search.families import build, small_config

JOB = {"sequence_length": 16, "document_mask": True}


class Careless(nn.Module):
    """Takes positions. ``masks``: whether its blocks are given a mask of documents; ``first``: from where it counts by itself;
    ``own_places``: whether it looks up places in the sequence all the same."""

    def __init__(self, *, masks: bool = True, first: int = 0, own_places: bool = False) -> None:
        super().__init__()
        self.masks, self.first, self.own_places = masks, first, own_places
        self.tokens, self.places = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        order = torch.arange(ids.shape[1])
        places = order + self.first if position_ids is None else position_ids
        x = self.tokens(ids) + self.places(order if self.own_places else places)
        document = (places.expand_as(ids) == 0).cumsum(1)
        mask = order[:, None] >= order
        if self.masks:
            mask = mask & (document[:, None, :, None] == document[:, None, None, :])
        for number, block in enumerate(self.blocks):
            x = block(x, mask if number == 1 else torch.zeros(mask.shape).masked_fill(~mask, float("-inf")))
        return x @ self.tokens.weight.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * mask.float().mean()


class Window(nn.Module):
    """Takes a whole mask as transformers does; its own is a window of three tokens. ``blocks_of_two``: tokens see their neighbour to
    one side; ``growing``: later blocks see further."""

    def __init__(self, *, blocks_of_two: bool = False, growing: bool = False) -> None:
        super().__init__()
        self.blocks_of_two, self.growing = blocks_of_two, growing
        self.tokens = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        order = torch.arange(ids.shape[1])
        apart = (order[:, None] - order).abs()
        x = self.tokens(ids)
        for number, block in enumerate(self.blocks):
            mask = order[:, None] // 2 == order // 2 if self.blocks_of_two else apart < 3 + number * self.growing
            if attention_mask is not None:
                mask = attention_mask if attention_mask.dim() == 4 else mask & (attention_mask[:, None, None] == 1)
            x = block(x, mask)
        return x @ self.tokens.weight.T


WINDOWS = Documents(masks=(("full_attention", BIDIRECTIONAL), ("sliding_attention", Sight(4, 4))))


def built(name: str, **more: Any) -> nn.Module:
    """A family, or one in which every second layer or so sees four tokens to each side."""
    windows = {"local_attention": 8} if name.startswith("windows of ") else {}
    return build(name.removeprefix("windows of "), **windows, **more)


def swapped() -> nn.Module:
    """Its config calls its layers by each other's kinds."""
    model = built("windows of modernbert")
    model.config.layer_types = model.config.layer_types[::-1]
    return model


def test_a_window_of_all_blocks_alike_is_handed_in() -> None:
    assert documents_apart(Window(), 16) == Documents(masks=((None, Sight(2, 2)),))


def build_eager(model_type: str) -> nn.Module:
    from ahp.graph.models import build_model

    return build_model(small_config(model_type), attention="eager")


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "mistral", "gemma3_text", "mixtral"])
def test_causal_families_make_masks_of_positions(model_type: str) -> None:
    assert documents_apart(build(model_type), 16) == Documents()


@pytest.mark.parametrize(
    ("model_type", "documents"),
    [
        ("bert", Documents(masks=((None, BIDIRECTIONAL),))),
        (
            "roberta",
            Documents(first_position=1, masks=((None, BIDIRECTIONAL),)),
        ),  # after the row of its padding, here 0
        ("modernbert", Documents(masks=((None, BIDIRECTIONAL),))),  # a window of 128, longer than the sequence
        ("windows of modernbert", WINDOWS),
        ("opt", Documents(masks=((None, CAUSAL),))),
    ],
)
def test_other_families_are_handed_a_mask(model_type: str, documents: Documents) -> None:
    assert documents_apart(built(model_type), 16) == documents
    model = built(model_type, device="cpu").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
    ids = torch.arange(3, 3 + places.numel()).view_as(places)
    with torch.no_grad():
        packed = logits_of(call_model(model, ids, places, documents))
        joined = logits_of(call_model(model, ids))
        for row, start, end in ((0, 0, 5), (0, 5, 8), (1, 0, 2), (1, 2, 8)):
            alone = logits_of(call_model(model, ids[row : row + 1, start:end]))[0]
            torch.testing.assert_close(packed[row, start:end], alone, rtol=1e-4, atol=1e-4)
            assert (joined[row, start:end] - alone).abs().max() > 1e-2 or (
                documents.masks[0][1] == CAUSAL and start == 0
            )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build("qwen3_next"), "block model.layers.0 is given no mask"),
        (lambda: build_eager("bert"), "its attention is not fused"),
        (lambda: Window(blocks_of_two=True), "a document mask would replace .* equally far"),
        (lambda: Window(growing=True), "a document mask would replace .* no names"),
        (swapped, "block model.layers.0 does not get the mask of its kind of layer"),
        (lambda: Careless(masks=False), "block blocks.0 is given no mask"),
        (lambda: Careless(first=2), "block blocks.0 is given no mask"),
        (lambda: Careless(own_places=True), "its positions would differ"),
        (lambda: nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32)), "takes no position_ids"),
    ],
    ids=[
        "linear attention",
        "eager",
        "blocks of two",
        "growing windows",
        "swapped windows",
        "own mask",
        "own start",
        "own positions",
        "no positions",
    ],
)
def test_others_are_refused_with_the_reason(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(BadInput, match=rf"job\.document_mask = True.*{words}.*valid: False"):
        documents_apart(make(), 16)


def test_a_model_is_looked_at_without_a_change_and_refused_before_it_is_traced() -> None:
    model = Careless()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    documents_apart(model, 16)
    assert model.training
    assert "forward" not in vars(model.blocks[0])
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(BadInput, match="no mask that hides other documents"):
        analyze(Careless(masks=False), JOB)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_attention_of_a_masked_graph_reads_the_mask(model_type: str) -> None:
    plain, masked = (analyze(build(model_type), {**JOB, "document_mask": mask}) for mask in (False, True))
    assert (plain.document_mask, masked.document_mask) == (False, True)
    inputs = [
        next(len(op.inputs) for op in graph.blocks[0].operators if "attention" in op.name) for graph in (plain, masked)
    ]
    assert inputs == [3, 4]


def test_a_mask_that_all_blocks_share_is_looked_at_once() -> None:
    """Each look takes seconds with thousands of tokens."""
    probe = Probe(build("llama"))
    with mock.patch.object(document_mask, "_sight", wraps=document_mask._sight) as looked:
        assert len(probe.sights(16)) == len(probe.blocks) > 1
    assert looked.call_count == 1
