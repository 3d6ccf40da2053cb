"""A model whose rank 1 hangs in the forward pass of a step, or all ranks do, until their launcher ends them."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn

from tests.runtime.models import OfTexts

AFTER = 4
"""Steps that all ranks do."""
CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def model() -> nn.Module:
    """With one micro-batch a step."""
    return hanging("1")


def everywhere() -> nn.Module:
    """As ``model``, on both of two ranks."""
    return hanging("0", "1")


def hanging(*ranks: str) -> nn.Module:
    found, calls = OfTexts(), []

    def hang(module: nn.Module, args: Any) -> None:
        traced = type(args[0]) is not torch.Tensor or args[0].is_meta
        if os.environ.get("RANK") in ranks and module.training and not traced:
            calls.append(1)
            if len(calls) > AFTER:
                signal.pause()

    found.get_submodule("blocks.1.up").register_forward_pre_hook(hang)
    return found
