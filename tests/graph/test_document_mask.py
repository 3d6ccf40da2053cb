"""Models that do not keep documents apart are told before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.document_mask import check_documents_apart
from ahp.graph.trace import analyze
from tests.search.families import build

JOB = {"sequence_length": 16, "document_mask": True}


class Careless(nn.Module):
    """Takes positions. ``masks``: whether its blocks are given a mask of documents; ``first``: from where it counts by itself."""

    def __init__(self, *, masks: bool = True, first: int = 0) -> None:
        super().__init__()
        self.masks, self.first = masks, first
        self.tokens, self.places = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        order = torch.arange(ids.shape[1])
        places = order + self.first if position_ids is None else position_ids
        x = self.tokens(ids) + self.places(places)
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


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "mistral", "gemma3_text", "mixtral"])
def test_causal_families_keep_documents_apart(model_type: str) -> None:
    check_documents_apart(build(model_type))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (build("bert"), "block bert.encoder.layer.0 is given no mask"),
        (build("opt"), "block model.decoder.layers.0 is given no mask"),
        (Careless(masks=False), "block blocks.0 is given no mask"),
        (Careless(first=2), "does not count positions from 0"),
        (nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32)), "takes no position_ids"),
    ],
    ids=["bert", "opt", "own mask", "own positions", "no positions"],
)
def test_others_are_refused_with_the_reason(model: nn.Module, words: str) -> None:
    with pytest.raises(BadInput, match=rf"job\.document_mask = True.*{words}.*valid: False"):
        check_documents_apart(model)


def test_a_model_is_looked_at_without_a_change_and_refused_before_it_is_traced() -> None:
    model = Careless()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_documents_apart(model)
    assert model.training
    assert "forward" not in vars(model.blocks[0])
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(BadInput, match="no mask that hides other documents"):
        analyze(Careless(masks=False), JOB)


def test_attention_of_a_masked_graph_reads_the_mask() -> None:
    plain, masked = (analyze(build("llama"), {**JOB, "document_mask": mask}) for mask in (False, True))
    assert (plain.document_mask, masked.document_mask) == (False, True)
    inputs = [
        next(len(op.inputs) for op in graph.blocks[0].operators if "attention" in op.name) for graph in (plain, masked)
    ]
    assert inputs == [3, 4]
