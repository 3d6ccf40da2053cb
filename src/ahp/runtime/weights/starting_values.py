"""What weights a run starts from: given ones, the model's own initialisation, or those that the model already has."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ahp.plan import Plan
from ahp.runtime.shard.parameter_layout import ParameterLayout
from ahp.runtime.weights.allocate import initial_weights, is_meta, materialize_buffers
from ahp.runtime.weights.hub_names import in_files, kept_buffers
from ahp.runtime.weights.initial import fill_initial
from ahp.runtime.weights.pretrained import Pretrained, fill


class StartingValues:
    """Looked at before the model is cut; its values are handed out after."""

    def __init__(self, module: nn.Module, plan: Plan, *, initialize: bool = True) -> None:
        """Gives a module on the meta device its buffers, in place. Raises BadInput when the weights given are not its own, or it
        cannot be initialised.

        ``initialize``: False where a checkpoint is read next, so that its parameters are neither drawn nor read from ``init_from``.
        """
        self._initialize = initialize
        self.streamed = is_meta(module)
        """Whether parameters get memory only once they are cut, so that no rank ever holds the whole model."""
        self._given = Pretrained(plan.init_from) if plan.init_from is not None else None
        self._stored = self._given.check(module, in_files(module)) if self._given is not None else {}
        self._initial = None
        if self.streamed and (self._given is not None or not initialize):
            in_checkpoint = {name for name, _ in kept_buffers(module)} if not initialize else set()
            materialize_buffers(module, {*self._stored, *in_checkpoint})
        elif self.streamed:
            self._initial = initial_weights(module, seed=plan.job.seed)

    def fill(self, layout: ParameterLayout, buffers: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Make this rank's parts of its parameters, and its buffers. Bytes of ``plan.init_from`` that it read for it."""
        if self._given is not None:
            fill(layout.parameters if self._initialize else {}, layout, buffers, self._given, self._stored)
            return self._given.bytes_read
        if self._initial is not None:
            fill_initial(layout, self._initial)
        return 0
