"""Which parameters the data of a step gave a gradient, and which not: an expert that no token went to, a layer that is not called.

Plain PyTorch leaves a parameter without a gradient as it is: no decay, no moment. Whether it has one depends on the whole global batch. So a
rank without a gradient has zeros, the ranks with one are counted, and if no rank has one the optimizer gets none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.models import NOTHING_TRAINED
from ahp.runtime.shard.ownership import LocalParameters


class GivenGradients:
    """``names``: all parameters of the whole model, in the same order on every rank."""

    def __init__(self, names: Iterable[str], local: LocalParameters, device: torch.device) -> None:
        self.places = {name: place for place, name in enumerate(names)}
        self.local = local
        self.all = torch.zeros(len(self.places), dtype=torch.float64, device=device)
        for name in local.trained:
            self.all[self.places[name]] = 1.0

    def absent(self, zeros: Collection[int]) -> set[str]:
        """The optimizer's parameters of this rank that its micro-batches gave no gradient. ``zeros``: ``id`` of each that has zeros instead."""
        of_all = [*self.local.parameters.items(), *self.local.twins]
        return self.local.trained - {name for name, p in of_all if p.grad is not None and id(p) not in zeros}

    def counts(self, absent: Collection[str]) -> torch.Tensor:
        """float64 [names], to be summed over all ranks: 1 for each parameter that this rank has a gradient of, else 0."""
        if not absent:
            return self.all
        found = self.all.clone()
        found[[self.places[name] for name in absent]] = 0.0
        return found

    def settle(
        self,
        gradients: dict[str, torch.Tensor],
        absent: Collection[str],
        counts: torch.Tensor,
        shards: dict[str, nn.Parameter],
    ) -> frozenset[str]:
        """Give each ``absent`` parameter zeros if some rank has a gradient of it, else no gradient; returns the latter. ``counts``: summed over
        all ranks. The host waits for the device if any are absent, or if this rank trains none. Raises BadInput, on every rank, if no rank has a
        gradient: of a pipeline, whose stages are given hidden states that require one, autograd does not."""
        if not absent and self.local.trained:
            return frozenset()
        of_all = counts.tolist()
        if not any(of_all):
            raise nothing_trained()
        nobodys = frozenset(name for name in absent if not of_all[self.places[name]])
        for name in absent:
            if name in nobodys:
                gradients.pop(name, None)
            elif name not in gradients:
                gradients[name] = torch.zeros_like(shards[name])
        return nobodys


def nothing_trained() -> BadInput:
    return BadInput(f"module: {NOTHING_TRAINED}")
