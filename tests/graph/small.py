"""Small models of every family that the graph's tests trace and run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from ahp.graph.operators import ModelGraph
from ahp.graph.trace import analyze

VOCABULARY, SEQUENCE = 101, 32

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 2}

MINIMAX = _GROUPED | {
    "model_type": "minimax",
    "head_dim": 16,
    "block_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
"""Its tables of decay are buffers in the type that the model is built in: fp32 in the runtime, 16 bits in a trace."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED | {"model_type": "llama", "tie_word_embeddings": False},
    "gpt2": _GPT2,
    "gpt2 with dropout": _GPT2 | {"embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "bert": _SIZES | {"model_type": "bert", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "qwen3": _GROUPED | {"model_type": "qwen3", "head_dim": 16},
    "gemma3": _GROUPED
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": _GROUPED | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


IN_FAST = ("llama", "gpt2", "mixtral")
"""The fast part runs these: grouped keys, packed projections, experts."""


def marked(name: str, *more: Any) -> Any:
    """A case for one of ``CONFIGS``, slow where the fast part leaves it out."""
    return pytest.param(name, *more, marks=[] if name in IN_FAST else pytest.mark.slow)


class Block(nn.Module):
    """A residual block that hands on two values, as some models do, and takes the second by keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, *, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.down(torch.relu(self.up(self.norm(x)))), count + 1


class Custom(nn.Module):
    """No config, no transformers; the argument has a name of its own and the answer is a tuple."""

    def __init__(self, layers: int = 3, width: int = 16, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.stack = nn.ModuleList([Block(width) for _ in range(layers)])
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        x, count = self.embed(tokens), torch.zeros(tokens.shape[0])
        for block in self.stack:
            x, count = block(x, count=count)
        return self.out(x), 0


class Plain(nn.Module):
    """No stack of blocks at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(input_ids))


@torch.compiler.disable
def outside(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class TwoGraphs(Block):
    """One of which torch.compile makes two graphs."""

    def forward(self, x: torch.Tensor, *, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(outside(x), count=count)


def two_graphs() -> nn.Module:
    module = Custom()
    module.stack = nn.ModuleList(TwoGraphs(16) for _ in range(3))
    return module


def custom() -> nn.Module:
    """A factory: ``tests.graph.small:custom``."""
    return Custom()


def plain() -> nn.Module:
    """A factory of a model without blocks."""
    return Plain()


not_a_model = dict


def broken() -> nn.Module:
    """A factory that fails."""
    raise KeyError("width")


@cache
def traced(name: str, precision: str = "fp32", batch: int = 1, attention: str = "flash") -> ModelGraph:
    """The graph of one of ``CONFIGS``, traced once for all tests."""
    job = {"sequence_length": SEQUENCE, "precision": precision}
    return analyze(CONFIGS[name], job, micro_batch_size=batch, attention=attention)
