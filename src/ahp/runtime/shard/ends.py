"""Makes the embedding and the head units of communication of their own.

Otherwise all weights outside of the blocks are one unit, gathered before the first block, with its gradients sent after all others: with a
large vocabulary, gigabytes that nothing overlaps. The head's weights are needed last, and its gradients are ready first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ahp.graph.outline import Outline, is_head, looks_up_rows


def ends_of(module: nn.Module, found: Outline | None) -> tuple[str, str] | None:
    """The paths of the token embedding and of the head; None if they are not known.

    Without an outline, a transformers model is asked for them. If the logits are no module's output, the code that makes them may
    read the embedding's weight, which then must not be freed. Nor may that of an embedding with a norm inside (Inkling's): its backward
    reads the norm's weight, and ``Sharding.apply`` does not gather an embedding for backward.
    """
    if found is not None:
        embedding, head = found.token_embedding, found.head
    else:
        asked = (getattr(module, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
        modules = [ask() if callable(ask) else None for ask in asked]
        paths = {id(part): path for path, part in module.named_modules()}
        embedding, head = (paths.get(id(part)) for part in modules)
        first, last = modules
        if not (
            isinstance(first, nn.Embedding) and looks_up_rows(first) and isinstance(last, nn.Linear) and is_head(last)
        ):
            return None
    return (embedding, head) if embedding and head else None


def units_of(model: nn.Module, ends: tuple[str, str] | None) -> tuple[nn.Module | None, nn.Module | None]:
    """The embedding and the head as modules, each None unless it is on the stage and shares no weight. FSDP2 takes tied weights
    in one unit only, which is then the rest of the stage."""
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
    """Wraps a module that runs several times in a forward pass. The wrapper is FSDP2's unit instead, so that weights are gathered
    once and gradients sent once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns ``compute(x)``, which runs the module."""
        return compute(x)
