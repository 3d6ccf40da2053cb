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
    """Seconds of the forward pass's tensor-parallel collectives that computation does not hide."""
    tensor_again_s: float
    """The part of ``tensor_forward_s`` whose results the backward pass reads, so that recompute must run it again."""
    tensor_gather_s: float
    """The part of ``tensor_forward_s`` that all-gathers take."""
    tensor_backward_s: float
    """Like ``tensor_forward_s`` for the backward pass, before products for weight gradients hide any of it."""
    tensor_launches: int
    """Number of tensor-parallel collectives in one pass."""
    context_forward_s: float
    """Seconds that attention waits for what it needs from other context-parallel ranks."""
    context_again_s: float
    """The part of it that selective recompute sends again, where it sends anything: 0 for a ring, whose result is kept."""
    context_backward_s: float
    context_hidden_s: tuple[float, float]
    """Seconds of the forward and of the backward pass that hide a ring's messages."""
    expert_s: float
    """Seconds that one pass waits while tokens go to their experts and back."""
    tensors: tuple[int, ...]
    """Elements of each weight, in the order of the forward pass."""
    parameters: int
    """Elements of the weights that the rank holds, before sharding over data ranks."""
    experts: int
    """Elements of ``parameters`` in experts, which fewer data ranks hold in common."""
    shapes: int
    """Elements of one weight of each shape: ``parameters`` with one expert instead of all."""
    stalled_launches: float = 0.0
    """Operators of a forward pass that the host launches while the device is idle."""
