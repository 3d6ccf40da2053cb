"""The record of what one segment costs on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.forecast.activations import SegmentMemory
from ahp.forecast.compute import SegmentTimes


@dataclass(frozen=True, slots=True)
class Unit:
    """One segment on one rank, for one micro-batch."""

    times: SegmentTimes
    memory: SegmentMemory
    tensor_forward_s: float
    """Tensor-parallel collectives of the forward pass, as far as they show."""
    tensor_again_s: float
    """Of them, those that make what the backward pass reads, so that a second run of the forward pass needs them."""
    tensor_gather_s: float
    """Of them, all-gathers."""
    tensor_backward_s: float
    """The same of the backward pass, before products for weight gradients hide any."""
    tensor_launches: int
    """Tensor-parallel collectives of one pass."""
    context_forward_s: float
    """What attention needs of the other context-parallel ranks, as far as the wait for it shows."""
    context_again_s: float
    """Of it, what selective recompute sends again where it sends anything: around a ring it keeps the result."""
    context_backward_s: float
    context_hidden_s: tuple[float, float]
    """Seconds of the forward and of the backward pass that what goes round a ring hides behind."""
    expert_s: float
    """Tokens sent to their experts and back, in one pass."""
    tensors: tuple[int, ...]
    """Elements of each of its weights, in the order of the forward pass."""
    parameters: int
    """Elements of its weights that the rank holds, before sharding over data ranks."""
    experts: int
    """Of them, those of experts, which fewer data ranks hold alike."""
    shapes: int
    """Of them, one of each shape: all but those of every expert but one."""
    stalled_launches: float = 0.0
    """Operators of a forward pass during whose launch the device has nothing to do."""
