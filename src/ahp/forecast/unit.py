"""The record of what one segment costs on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.forecast.activations import SegmentMemory
from ahp.forecast.compute import SegmentTimes
from ahp.forecast.context import SharedTokens
from ahp.forecast.divided import Held
from ahp.forecast.tensor_collectives import TensorCost


@dataclass(frozen=True, slots=True)
class Unit:
    """One segment on one rank, for one micro-batch."""

    times: SegmentTimes
    memory: SegmentMemory
    tensor: TensorCost
    context: SharedTokens
    expert_s: float
    """Seconds that one pass waits while tokens go to their experts and back."""
    back_s: float
    """The part of it on the way back, where a second run that stops at the last read result leaves that out."""
    weights: Held
    stalled_launches: float = 0.0
    """Operators of a forward pass that the host launches while the device is idle."""
