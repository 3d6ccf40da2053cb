"""Seconds of segments in both passes and what recompute adds to them, in arrays: stages add them up, and bounds take the least or the most.

Dims: K = kinds of layers, R = kinds of recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from ahp.arrays import Floats
from ahp.engines.traits import HostTraits
from ahp.forecast.compute import Work
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.overlap import shown_s
from ahp.forecast.unit import Unit
from ahp.forecast.units import Units

Recompute = Literal["none", "core", "chains", "beside_products", "every_second_product", "read", "full"]
"""What the backward pass recomputes of a block: nothing, the core of unfused attention, element-wise chains, all except for weight
products and fused attention, the same plus every second one of these products, all up to the last result that backward reads, or all."""

OF_INPUT: tuple[Recompute, ...] = ("read", "full")
"""Kinds of recompute that keep only the input of a block."""


def recomputed(unit: Unit, recompute: Recompute) -> Work:
    """The part of a block's forward pass that runs a second time."""
    times = unit.times
    match recompute:
        case "none":
            return Work()
        case "core":
            return times.core_attention
        case "chains":
            return times.element_wise
        case "beside_products":
            return times.element_wise + times.core_attention
        case "every_second_product":
            return times.element_wise + times.core_attention + times.second_products
        case "read":
            return times.read
        case "full":
            return times.forward


def launched_beside(unit: Unit, recompute: Recompute, host: HostTraits) -> tuple[float, float]:
    """The host's further work to recompute a block, as a number of forward operators that take as long: in the block's first run, and in its
    backward pass. The block's operators and those that run again are not counted."""
    if recompute in ("none", "core") or host.checkpoint is None:
        return 0.0, 0.0
    first, again = host.checkpoint.full if recompute in OF_INPUT else host.checkpoint.selective
    own = unit.times.forward.launches
    return first * own, again * own - recomputed(unit, recompute).launches


def sent_again_s(unit: Unit, recompute: Recompute, data: DataParallel) -> tuple[float, float]:
    """Seconds of a block's forward collectives that run a second time: those of tensor parallelism, those of context parallelism."""
    if recompute == "none":
        return 0.0, 0.0
    if recompute == "full":
        return unit.tensor.forward_s, unit.context.forward_s
    if recompute == "read":
        return unit.tensor.again_s, unit.context.forward_s
    again = data.traits.recompute.sends_again
    if again == "all":
        return unit.tensor.again_s, unit.context.again_s
    return unit.tensor.gather_s if again == "gathers" else 0.0, 0.0


def tokens_again_s(unit: Unit, recompute: Recompute, data: DataParallel) -> float:
    """Seconds in which tokens go to their experts, and results back, a second time."""
    if recompute == "read":
        return unit.expert_s - unit.back_s
    keeps = data.traits.recompute.keeps_arrived
    again = recompute == "full" or (recompute in ("beside_products", "every_second_product") and not keeps)
    return unit.expert_s if again else 0.0


def tensor_backward_s(unit: Unit, overlap: float) -> float:
    """Seconds of backward tensor-parallel collectives that weight-gradient products do not hide; ``overlap``: the share they can hide."""
    beside = unit.times.weight_gradient.device_s
    return shown_s(unit.tensor.backward_s, beside, overlap)


FIGURES: dict[str, Callable[[Unit, float], float]] = {
    "forward": lambda u, _: u.times.forward_s,
    "tensor_forward": lambda u, _: u.tensor.forward_s,
    "context_forward": lambda u, _: u.context.forward_s,
    "expert": lambda u, _: u.expert_s,
    "backward": lambda u, _: u.times.backward_s,
    "tensor_backward": tensor_backward_s,
    "tensor_hidden": lambda u, overlap: u.tensor.backward_s - tensor_backward_s(u, overlap),
    "context_backward": lambda u, _: u.context.backward_s,
    "weight_gradient": lambda u, _: u.times.weight_gradient.device_s,
    "tensor_launches": lambda u, _: u.tensor.launches,
    "forward_launches": lambda u, _: u.times.forward.launches,
    "input_gradient_launches": lambda u, _: u.times.input_gradient.launches,
    "weight_gradient_launches": lambda u, _: u.times.weight_gradient.launches,
    "stalled_launches": lambda u, _: u.stalled_launches,
    "hidden_forward": lambda u, _: u.context.hidden_forward_s,
    "hidden_backward": lambda u, _: u.context.hidden_backward_s,
}
"""Figures of a segment without recompute; the second argument is the share of tensor-parallel collectives that can hide behind weight
gradients."""

FORWARD = {
    "forward": "forward",
    "tensor_parallel": "tensor_forward",
    "context_parallel": "context_forward",
    "expert_parallel": "expert",
}
"""The figure that each part of a forward pass is."""

BACKWARD = {
    "backward": "backward",
    "tensor_parallel": "tensor_backward",
    "context_parallel": "context_backward",
    "expert_parallel": "expert",
}
"""The figure that each part of a backward pass is."""

AGAIN: dict[str, Callable[[Unit, Recompute, DataParallel], float]] = {
    "recompute": lambda u, kind, _: recomputed(u, kind).device_s,
    "tensor_parallel": lambda u, kind, data: sent_again_s(u, kind, data)[0],
    "context_parallel": lambda u, kind, data: sent_again_s(u, kind, data)[1],
    "expert_parallel": tokens_again_s,
    "hidden_forward": lambda u, kind, _: u.context.hidden_forward_s if kind in OF_INPUT else 0.0,
    "launches": lambda u, kind, _: recomputed(u, kind).launches,
    "beside_forward": lambda u, kind, data: launched_beside(u, kind, data.traits.host)[0],
    "beside_backward": lambda u, kind, data: launched_beside(u, kind, data.traits.host)[1],
}
"""What recompute adds to the passes of a layer: seconds by part, those of its computation that hide a ring's messages, operators that the host
launches again, and what else the host does, as a number of operators."""


class SegmentFigures:
    """The figures of a model's segments, and of its layers under some kinds of recompute. ``data``: of any way to shard states."""

    def __init__(self, units: Units, recompute: Sequence[Recompute], data: DataParallel) -> None:
        self.units, self.recompute, self.data = units, recompute, data

    @cached_property
    def plain(self) -> dict[str, Floats]:
        """[K + 2] each: ``FIGURES`` of each kind of layer, of the embedding and of the head."""
        segments = [*self.units.blocks, self.units.embedding, self.units.head]
        overlap = self.data.tensor_overlap
        found = np.array([[of(u, overlap) for u in segments] for of in FIGURES.values()], dtype=float)
        return dict(zip(FIGURES, found, strict=True))

    @cached_property
    def again(self) -> dict[str, Floats]:
        """[R, K] each: ``AGAIN`` of each kind of layer."""
        blocks, data = self.units.blocks, self.data
        found = [[[of(unit, kind, data) for unit in blocks] for kind in self.recompute] for of in AGAIN.values()]
        shape = len(AGAIN), len(self.recompute), len(blocks)
        return dict(zip(AGAIN, np.array(found, dtype=float).reshape(shape), strict=True))

    @cached_property
    def forward_s(self) -> Floats:
        """[K + 2] Device seconds of a forward pass."""
        return np.asarray(sum(self.plain[figure] for figure in FORWARD.values()))

    @cached_property
    def backward_s(self) -> Floats:
        """[K + 2] Device seconds of a backward pass, without recompute."""
        return np.asarray(sum(self.plain[figure] for figure in BACKWARD.values()))

    @cached_property
    def again_s(self) -> Floats:
        """[R, K] Device seconds in which a backward pass computes and sends again what was not kept."""
        sent_s = self.again["tensor_parallel"] + self.again["context_parallel"]
        return self.again["recompute"] + sent_s + self.again["expert_parallel"]

    @cached_property
    def window_forward_s(self) -> Floats:
        """[K] Seconds of a layer's forward pass that collectives of weights can hide behind: computation and waits for tensor-parallel
        ranks, without the seconds that hide a ring's messages, which go over the same network cards."""
        return (self.plain["forward"] + self.plain["tensor_forward"] - self.plain["hidden_forward"])[:-2]

    @cached_property
    def window_backward_s(self) -> Floats:
        """[R, K] The same of its backward pass."""
        again_s = self.again["recompute"] + self.again["tensor_parallel"] - self.again["hidden_forward"]
        return self._pass_back_s + again_s - self.plain["hidden_backward"][:-2]

    @cached_property
    def plain_window_backward_s(self) -> Floats:
        """[K] The same without recompute."""
        return self._pass_back_s - self.plain["hidden_backward"][:-2]

    @property
    def _pass_back_s(self) -> Floats:
        return (self.plain["backward"] + self.plain["tensor_backward"])[:-2]

    @cached_property
    def launches(self) -> Floats:
        """[3, K + 2] Operators of a forward pass, of a backward pass, and of the weight gradients in it, without recompute."""
        weights, collectives = self.plain["weight_gradient_launches"], self.plain["tensor_launches"]
        backward = self.plain["input_gradient_launches"] + weights + collectives
        return np.array([self.plain["forward_launches"] + collectives, backward, weights])
