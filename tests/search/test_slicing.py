"""Slicing finds the splits that people write by hand, and the cheapest ones by its own measure."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.capture import capture
from ahp.search.placement import Placement, R, Split
from ahp.search.slicing import slicing, solve
from tests.runtime.models import custom, gpt2, llama

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
HUB_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 16}, "gemma": {"head_dim": 16}, "gpt_neox": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0}, "nemotron": {}, "smollm3": {}, "granite": {},
}  # fmt: skip
WORDS = {"colwise": "column", "rowwise": "row"}


def hub_model(model_type: str, **more: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SMALL, **more})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("model_type", list(HUB_FAMILIES))
def test_finds_the_hubs_own_plan(model_type: str) -> None:
    module = hub_model(model_type, **HUB_FAMILIES[model_type])
    found = slicing(module, 2)
    written = {name: WORDS[style] for name, style in module.config.base_model_tp_plan.items() if style in WORDS}  # type: ignore[union-attr]
    assert written
    for name, word in written.items():
        (match,) = [found[key] for key in found if key.endswith(name)]
        assert match == word, name


def test_finds_the_megatron_split_of_packed_projections() -> None:
    assert slicing(gpt2(), 2) == {
        "transformer.wte": "row",
        "transformer.h.*.attn.c_attn": "column",
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
        "lm_head": "column",
    }
    found = slicing(custom(), 4)
    assert (found["blocks.*.qkv"], found["blocks.*.out"]) == ("column", "row")
    assert (found["blocks.*.up"], found["blocks.*.down"]) == ("column", "row")


def test_a_degree_that_does_not_divide_the_heads_leaves_attention_whole() -> None:
    """Two key-value heads over four ranks: the feed-forward layers are split, attention computes on every rank."""
    found = slicing(llama(), 4)
    assert found["model.layers.*.mlp.down_proj"] == "row"
    assert found["model.layers.*.self_attn.o_proj"] != "row"


def test_refuses_what_cannot_be_split() -> None:
    with pytest.raises(BadInput, match="at least 2"):
        slicing(llama(), 1)
    with pytest.raises(BadInput, match="tensor_parallel_degree = 7"):
        slicing(llama(), 7)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu_())


class Feed(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=bias), nn.Linear(16, 8, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def test_refuses_a_block_that_writes_in_place() -> None:
    with pytest.raises(BadInput, match="in place"):
        solve(capture(InPlace(), (torch.zeros(3, 8),), {}), 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("degree", [2, 4])
def test_no_other_placement_of_the_weights_is_cheaper(bias: bool, degree: int) -> None:
    captured = capture(Feed(bias), (torch.zeros(3, 8),), {})
    options: dict[str, list[Placement]] = {}
    for name, parameter in Feed(bias).named_parameters():
        options[name] = [R, *(Split(dim, (size,)) for dim, size in enumerate(parameter.shape))]
    costs = []
    for choice in product(*options.values()):
        try:
            costs.append(solve(captured, degree, dict(zip(options, choice, strict=True))).cost)
        except BadInput:
            continue  # such a placement cannot be run at all
    assert len(costs) > 2
    assert solve(captured, degree).cost == min(costs)
