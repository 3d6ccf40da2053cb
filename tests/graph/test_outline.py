"""The outline tells what is before, in and after the blocks of models that it has never heard of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.blocks import NoBlocks
from ahp.graph.capture import Capture
from ahp.graph.outline import logits_of, outline
from tests.runtime.models import custom, gpt2, llama


def test_llama() -> None:
    found = outline(llama(), batch_size=3, sequence_length=8)
    assert found.before == ("model.embed_tokens",)
    assert found.after == ("model.norm", "lm_head")
    assert (found.token_embedding, found.head) == ("model.embed_tokens", "lm_head")
    assert found.hidden.shape == (3, 8, 32)
    assert found.logits.shape == (3, 8, 128)
    assert found.kinds == (0, 0, 0, 0, 0)
    assert isinstance(found.captures[0], Capture)


def test_dtype_is_that_of_the_computation() -> None:
    assert outline(llama(), batch_size=1, sequence_length=8, dtype=torch.bfloat16).hidden.dtype is torch.bfloat16


def test_gpt2_keeps_its_positions_apart_from_its_tokens() -> None:
    found = outline(gpt2(), batch_size=2, sequence_length=8)
    assert found.before == ("transformer.wte", "transformer.wpe")
    assert found.token_embedding == "transformer.wte"


def test_the_module_itself_counts_when_it_holds_a_table() -> None:
    module = custom()
    found = outline(module, batch_size=2, sequence_length=8)
    assert found.before == ("tokens",)
    assert found.after == ("norm", "head", "")
    assert all(not p.grad and p.device.type == "cpu" for p in module.parameters())


class Tied(nn.Module):
    """The logits come from a function, not a module: nothing may be split by vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.tokens.weight.T


def test_a_functional_head_is_no_module() -> None:
    assert outline(Tied(), batch_size=1, sequence_length=4).head is None


def test_refuses_what_it_cannot_run() -> None:
    with pytest.raises(NoBlocks):
        outline(nn.Linear(2, 2), batch_size=1, sequence_length=4)
    broken = Tied()
    broken.tokens = nn.Embedding(16, 9)
    with pytest.raises(BadInput, match="fails on fake tensors"):
        outline(broken, batch_size=1, sequence_length=4)
    with pytest.raises(BadInput, match="logits"):
        logits_of(object())
