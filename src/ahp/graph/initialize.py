"""A model's own initialization: transformers' rules, or ``reset_parameters`` of its modules."""

from __future__ import annotations

import torch
from torch import nn


def is_hub_model(module: nn.Module) -> bool:
    """Whether a module is one of transformers' models, which can initialize themselves."""
    return hasattr(module, "_init_weights") and hasattr(module, "config")


def initialize(module: nn.Module) -> None:
    """Write every parameter and buffer, in place. On the meta device there are no values, but buffers may have memory already."""
    if is_hub_model(module):
        _initialize_hub_model(module)
        return
    for child in module.modules():
        if callable(getattr(child, "reset_parameters", None)):
            child.reset_parameters()  # type: ignore[operator]


def _initialize_hub_model(module: nn.Module) -> None:
    """transformers' own initialization; it skips tensors and modules marked as loaded, so the marks are removed first."""
    for child in module.modules():
        if hasattr(child, "_is_hf_initialized"):
            del child._is_hf_initialized
    for tensor in [*module.parameters(), *module.buffers()]:
        if hasattr(tensor, "_is_hf_initialized"):
            del tensor._is_hf_initialized
    with torch.no_grad():
        module.apply(module._init_weights)  # type: ignore[arg-type]
