"""Embedding and head as units of communication of their own.

What is in no block is one unit otherwise, gathered before the first block and sent after the last one's gradients: of a large vocabulary
gigabytes that nothing hides. The head's weights are needed last, and their gradients are there first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ahp.graph.outline import Outline


def ends_of(module: nn.Module, found: Outline | None) -> tuple[str, str] | None:
    """The paths of the embedding of the tokens and of the head; None where they cannot be told from the rest.

    Without an outline transformers' models say it themselves. Where the logits are no module's output, whatever makes them may read
    the embedding's weight, which then must not be freed.
    """
    if found is not None:
        embedding, head = found.token_embedding, found.head
    else:
        asked = (getattr(module, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
        modules = [ask() if callable(ask) else None for ask in asked]
        paths = {id(part): path for path, part in module.named_modules()}
        embedding, head = (paths.get(id(part)) for part in modules)
        if not (isinstance(modules[0], nn.Embedding) and isinstance(modules[1], nn.Linear)):
            return None
    return (embedding, head) if embedding and head else None


def units_of(model: nn.Module, ends: tuple[str, str] | None) -> tuple[nn.Module | None, nn.Module | None]:
    """Of the embedding and the head those that are on a stage, have weights of their own, and so can be units: FSDP2 takes tied
    weights in one unit only, which is what is left of the stage."""
    here = dict(model.named_modules())
    holders: dict[int, int] = {}
    for module in here.values():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found = [here.get(path) for path in ends or ()]
    own = [
        module
        if module is not None
        and module._parameters
        and all(holders[id(parameter)] == 1 for parameter in module.parameters())
        else None
        for module in found
    ]
    return (own[0], own[1]) if own else (None, None)


class GatheredOnce(nn.Module):
    """Around a module that runs several times in a forward pass: as FSDP2's unit in its place, so that its weights are gathered once
    and its gradients sent once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``compute(x)``, which runs the module."""
        return compute(x)
