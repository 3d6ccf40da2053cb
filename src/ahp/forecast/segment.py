"""Seconds of one segment in both passes, and what each kind of recompute computes, sends and holds again."""

from __future__ import annotations

from typing import Literal

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


def launches(unit: Unit) -> tuple[float, float, float]:
    """Operators of a forward pass, of a backward pass, and of the weight gradients in it, without recompute."""
    times = unit.times
    weights = times.weight_gradient.launches
    return (
        times.forward.launches + unit.tensor.launches,
        times.input_gradient.launches + weights + unit.tensor.launches,
        weights,
    )


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


def tensor_backward_s(unit: Unit, overlap: float) -> float:
    """Seconds of backward tensor-parallel collectives that weight-gradient products do not hide; ``overlap``: the share they can hide."""
    beside = unit.times.weight_gradient.device_s
    return shown_s(unit.tensor.backward_s, beside, overlap)


def segment_forward_s(unit: Unit) -> float:
    """Device seconds of one segment's forward pass."""
    return unit.times.forward_s + unit.tensor.forward_s + unit.context.forward_s + unit.expert_s


def segment_backward_s(unit: Unit, tensor_overlap: float) -> float:
    """Device seconds of one segment's backward pass, without recompute."""
    return unit.times.backward_s + tensor_backward_s(unit, tensor_overlap) + unit.context.backward_s + unit.expert_s


def segment_again_s(unit: Unit, recompute: Recompute, data: DataParallel) -> float:
    """Device seconds in which a backward pass computes and sends again what was not kept."""
    experts_s = unit.expert_s if recompute in OF_INPUT else 0.0
    return recomputed(unit, recompute).device_s + sum(sent_again_s(unit, recompute, data)) + experts_s


def window_forward_s(unit: Unit) -> float:
    """Seconds of a block's forward pass that collectives of weights can hide behind.

    These are computation and waits for tensor-parallel ranks, without the seconds that hide a ring's messages, which go over
    the same network cards.
    """
    return unit.times.forward_s + unit.tensor.forward_s - unit.context.hidden_forward_s


def window_backward_s(unit: Unit, recompute: Recompute, data: DataParallel) -> float:
    """``window_forward_s`` for the backward pass."""
    again_s = recomputed(unit, recompute).device_s + sent_again_s(unit, recompute, data)[0]
    again_s -= unit.context.hidden_forward_s if recompute in OF_INPUT else 0.0
    return (
        unit.times.backward_s + tensor_backward_s(unit, data.tensor_overlap) + again_s - unit.context.hidden_backward_s
    )


def dropped_bytes(unit: Unit, units: Units, recompute: Recompute) -> int:
    """Bytes that recompute saves of what a block keeps; below 0 where the results it keeps are more than backward needs."""
    memory = unit.memory
    match recompute:
        case "none":
            return 0
        case "core":
            return memory.saved_in_core
        case "chains":
            return memory.saved_in_chains
        case "beside_products":
            return memory.saved - units.hidden_bytes - memory.beside_products.kept
        case "every_second_product":
            return memory.saved - units.hidden_bytes - memory.every_second_product.kept
        case "read" | "full":
            return max(0, memory.saved - units.hidden_bytes)


def made_again(unit: Unit, recompute: Recompute, dropped: int) -> int:
    """Bytes that one block recomputes before its backward pass."""
    memory = unit.memory
    match recompute:
        case "none":
            return 0
        case "beside_products":
            return memory.beside_products.made_again
        case "every_second_product":
            return memory.every_second_product.made_again
        case "read" | "full":
            return max(memory.saved, memory.forward_extra)
    return dropped
