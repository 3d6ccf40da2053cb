"""What training changes from step to step, and so what a checkpoint holds: apart from what is done with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ahp.runtime.optimizer.adamw import ShardedOptimizer
from ahp.runtime.optimizer.loss_scale import LossScale
from ahp.runtime.pipeline.cut import Stage
from ahp.runtime.shard.buffers import Buffers
from ahp.runtime.shard.ownership import LocalParameters
from ahp.runtime.shard.parameter_layout import ParameterLayout


@dataclass
class TrainingState:
    """Of one rank: its parts of weights and optimizer states, and the numbers that every rank has alike."""

    layout: ParameterLayout
    local: LocalParameters
    optimizer: ShardedOptimizer
    loss_scale: LossScale
    stages: Mapping[int, Stage]
    """The stages of this rank by their number; the weights and buffers are theirs."""
    buffers: Buffers
    num_steps_done: int = 0
    written_elsewhere: frozenset[str] = frozenset()
    """Parameters that this rank holds and a checkpoint has from another stage of another width: of one layout of parts alone."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of which this rank holds a part, by the hub's names; DTensors where they are split."""
        return self.local.parameters
