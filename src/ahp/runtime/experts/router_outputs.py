"""Blocks that tell what some of their modules give: what routers say, for the balance loss of a mixture.

A hook that keeps tensors for later sees nothing of a block that runs as one graph, rewritten or compiled. So they become
outputs of the block's forward, and are taken off outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Note = Callable[[torch.Tensor], None]


class WithRouterOutputs:
    """The forward of a block that returns, beside its output, those of some of its modules in the order of their calls."""

    def __init__(self, block: nn.Module, outputs: dict[str, int]) -> None:
        """``outputs``: by the path of a module in the block which of its outputs, if it has several."""
        self.forward = block.forward
        self.told: list[torch.Tensor] = []
        for path, index in outputs.items():
            block.get_submodule(path).register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.told.append(output[index] if isinstance(output, tuple) else output)

        return hook

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        self.told = []
        out = self.forward(*args, **kwargs)
        told, self.told = tuple(self.told), []
        return out, told


class RouterOutputsTaken:
    """The forward of a block as it was, and what it tells goes to ``note``."""

    def __init__(self, telling: Callable[..., Any], note: Note) -> None:
        self.telling, self.note = telling, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, told = self.telling(*args, **kwargs)
        for tensor in told:
            self.note(tensor)
        return out
