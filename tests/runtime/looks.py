"""Counts where a GPU would make the host wait, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Looks(TorchFunctionMode):
    """Counts how often the values of a tensor decide what the host does next: on a GPU it would wait there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__)
        self.count += func in waits
        return func(*args, **(kwargs or {}))
