"""Makes blocks return the outputs of their routers next to their own, for the balance loss of a mixture.

A hook that keeps tensors for later does not work in a block that runs as one graph, rewritten or compiled. So the routers'
outputs become outputs of the block's forward, and are taken off outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Collect = Callable[[torch.Tensor], None]


class WithRouterOutputs:
    """The forward of a block that also returns the outputs of some of its modules, in the order of their calls."""

    def __init__(self, block: nn.Module, outputs: dict[str, int]) -> None:
        """``outputs``: path of a module in the block -> which of its outputs, if it has several."""
        self.forward = block.forward
        self.collected: list[torch.Tensor] = []
        for path, index in outputs.items():
            block.get_submodule(path).register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.collected.append(output[index] if isinstance(output, tuple) else output)

        return hook

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        self.collected = []
        out = self.forward(*args, **kwargs)
        collected, self.collected = tuple(self.collected), []
        return out, collected


class RouterOutputsTaken:
    """The forward of a block with its own output only; what its routers returned goes to ``collect``."""

    def __init__(self, with_outputs: Callable[..., Any], collect: Collect) -> None:
        self.with_outputs, self.collect = with_outputs, collect

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, collected = self.with_outputs(*args, **kwargs)
        for tensor in collected:
            self.collect(tensor)
        return out
