"""What training changes from step to step, and so what a checkpoint holds."""

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
    """The state of one rank: its parts of weights and optimizer states, and the numbers that are the same on every rank."""

    layout: ParameterLayout
    local: LocalParameters
    optimizer: ShardedOptimizer
    loss_scale: LossScale
    stages: Mapping[int, Stage]
    """This rank's stages, keyed by number; they hold the weights and buffers."""
    buffers: Buffers
    num_steps_done: int = 0
    written_elsewhere: frozenset[str] = frozenset()
    """Parameters of this rank that a stage of another width writes instead: a checkpoint takes one layout of parts per tensor."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds a part of, keyed by the hub's names; DTensors where they are split."""
        return self.local.parameters
