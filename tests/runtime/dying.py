"""A model whose rank 1 is killed in the forward pass of a step, as by a system that ran out of memory."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn

from tests.runtime.models import OfTexts

AFTER = 3
"""Steps that all ranks do."""


def model() -> nn.Module:
    """With one micro-batch a step."""
    found, calls = OfTexts(), []

    def die(module: nn.Module, args: Any) -> None:
        traced = type(args[0]) is not torch.Tensor or args[0].is_meta
        if os.environ.get("RANK") == "1" and module.training and not traced:
            calls.append(1)
            if len(calls) > AFTER:
                os.kill(os.getpid(), signal.SIGKILL)

    found.get_submodule("blocks.1.up").register_forward_pre_hook(die)
    return found
