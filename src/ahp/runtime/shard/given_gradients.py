"""Parameters that the data of a step gave a gradient, and those that they gave none: an expert that no token went to, a layer that is not called.

Plain PyTorch leaves a parameter without a gradient as it is: no decay, no moment. Whether it has one depends on the whole global batch. So every
rank has zeros where it has none, all ranks count, and where nobody has one the optimizer is given none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from ahp.runtime.shard.ownership import LocalParameters


class GivenGradients:
    """``names``: of the whole model's parameters, the same on every rank."""

    def __init__(self, names: Iterable[str], local: LocalParameters, device: torch.device) -> None:
        self.places = {name: place for place, name in enumerate(names)}
        self.local = local
        self.all = torch.zeros(len(self.places), dtype=torch.float64, device=device)
        for name, parameter in local.parameters.items():
            self.all[self.places[name]] = float(parameter.requires_grad)

    def absent(self, zeros: Collection[int]) -> set[str]:
        """Trainable parameters of this rank that its micro-batches gave no gradient. ``zeros``: ``id`` of those that have zeros in its place."""
        of_all = [*self.local.parameters.items(), *self.local.twins]
        given = {name for name, p in of_all if not p.requires_grad or (p.grad is not None and id(p) not in zeros)}
        return self.local.parameters.keys() - given

    def counts(self, absent: Collection[str]) -> torch.Tensor:
        """float64 [names]: to be added up over all ranks; 1 for each parameter that this rank has a gradient of."""
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
        """Give each of the ``absent`` zeros where some rank has a gradient of it, and none where nobody has; returns the latter. ``counts``: of all
        ranks. The host waits for the device where there are any."""
        if not absent:
            return frozenset()
        of_all = counts.tolist()
        nobodys = frozenset(name for name in absent if not of_all[self.places[name]])
        for name in absent:
            if name in nobodys:
                gradients.pop(name, None)
            elif name not in gradients:
                gradients[name] = torch.zeros_like(shards[name])
        return nobodys
