"""The weights that a run starts from: given ones, the model's own initialization, or those that the model already has."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ahp.graph.lora import base_alone, base_name, initialize_adapters, is_adapter
from ahp.plan import Plan
from ahp.runtime.shard.parameter_layout import ParameterLayout
from ahp.runtime.weights.allocate import initial_weights, is_meta, materialize_buffers
from ahp.runtime.weights.hub_names import InFiles, in_files, kept_buffers
from ahp.runtime.weights.initial import InitialWeights, fill_initial
from ahp.runtime.weights.pretrained import Pretrained, fill


class StartingValues:
    """Checks and records the weights before the model is cut, and fills them in afterwards."""

    def __init__(self, module: nn.Module, plan: Plan, *, initialize: bool = True) -> None:
        """Gives a module on the meta device its buffers, in place. Raises BadInput when the weights given are not its own, or it
        cannot be initialized.

        ``initialize``: False if a checkpoint is read next: parameters are neither drawn nor read from ``init_from``, whose folder
        need not exist.
        """
        self.streamed = is_meta(module)
        """Whether parameters get memory only once they are cut, so that no rank ever holds the whole model."""
        self._given = Pretrained(plan.init_from) if initialize and plan.init_from is not None else None
        self._stored: dict[str, InFiles] = {}
        """Tensors of ``plan.init_from``, keyed by the names of the model without adapters."""
        self._initial: list[InitialWeights] = []
        with base_alone(module):
            if self._given is not None:
                self._stored = self._given.check(module, in_files(module))
            if self.streamed and (self._given is not None or not initialize):
                in_checkpoint = {name for name, _ in kept_buffers(module)} if not initialize else set()
                materialize_buffers(module, {*self._stored, *in_checkpoint})
            elif self.streamed:
                self._initial.append(initial_weights(module, seed=plan.job.seed))
        if self.streamed and initialize:
            self._initial += _adapters(module, plan.job.seed)

    def fill(self, layout: ParameterLayout, buffers: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Fill this rank's parts of its parameters, and its buffers. Returns how many bytes of ``plan.init_from`` it read."""
        for initial in self._initial:
            fill_initial(layout, initial)
        if self._given is None:
            return 0
        parameters = {name: p for name, p in layout.parameters.items() if not is_adapter(name)}
        fill(
            parameters,
            layout,
            buffers,
            self._given,
            {name: self._stored[base_name(name)] for name in parameters} | self._stored,
        )
        return self._given.bytes_read


def _adapters(module: nn.Module, seed: int) -> list[InitialWeights]:
    """The initial values of a meta module's adapters, if it has any."""
    parameters = {name: p for name, p in module.named_parameters() if is_adapter(name)}
    if not parameters:
        return []
    names = {id(p): name for name, p in parameters.items()}
    return [InitialWeights(names, list(parameters.values()), seed, lambda: initialize_adapters(module))]
