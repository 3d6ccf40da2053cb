"""What one pipeline stage takes: the times that the schedule needs, part by part."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

from ahp.forecast.communication import Times
from ahp.forecast.compute import Work
from ahp.forecast.data_parallel import CommUnit, DataParallel, StageParameters
from ahp.forecast.overlap import shown_s
from ahp.forecast.sharing import WeightCommunication, outside_blocks
from ahp.forecast.unit import Unit
from ahp.forecast.units import Units


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage: per micro-batch by part, and once per step by part.

    What comes once is beyond the pass that it comes with, as far as the device does not wait for the host there anyway.
    """

    forward: dict[str, float]
    backward: dict[str, float]
    """The whole backward."""
    input_gradient: dict[str, float]
    """Where a schedule splits the backward: all of it but what makes weight gradients."""
    weight_gradient: dict[str, float]
    """What makes weight gradients, which can wait there. The two are launched apart, so that each waits for the host by itself."""
    first_forward: dict[str, float]
    last_backward: dict[str, float]
    last_weight_gradient: dict[str, float]
    """The last backward, where a schedule splits it."""

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The first seven, summed over their parts."""
        passes = self.forward, self.backward, self.input_gradient, self.weight_gradient
        once = self.first_forward, self.last_backward, self.last_weight_gradient
        return tuple(sum(parts.values()) for parts in (*passes, *once))

    def scaled(self, factor: float) -> StageCost:
        """The same stage with all its seconds times ``factor``."""
        seconds = {
            field.name: {part: factor * s for part, s in parts.items()}
            for field in fields(self)
            if isinstance(parts := getattr(self, field.name), dict)
        }
        return replace(self, **seconds)


Recompute = Literal["none", "core", "chains", "beside_products", "every_second_product", "read", "full"]
"""What of a block is computed again in the backward pass: nothing, the core of unfused attention, element-wise chains, all but
products with a weight and fused attention, of these products every second one as well, all up to the last result that is read again, all."""

OF_INPUT: tuple[Recompute, ...] = ("read", "full")
"""What keeps nothing of a block but what enters it."""


def stage_cost(
    units: Units,
    layers: range,
    *,
    first: bool,
    last: bool,
    recompute: Recompute,
    data: DataParallel,
    network: Times,
    bytes_per_s: float,
    recomputed_layers: int | None = None,
    passes_behind: int = 0,
) -> StageCost:
    """Price the stage that holds ``layers``, the embedding if ``first``, the head if ``last``.

    ``recomputed_layers``: so many of its first layers are recomputed; None = all. ``passes_behind``: backward passes of other stages
    that the rank computes after this stage's last one, behind which gradients may still travel.
    """
    blocks = [units.blocks[units.layers[i]] for i in layers]
    some = len(blocks) if recomputed_layers is None else recomputed_layers
    recomputes: list[Recompute] = [recompute if i < some else "none" for i in range(len(blocks))]
    ends = ([units.embedding] if first else []) + ([units.head] if last else [])
    before, after = outside_blocks(units, data.traits, first=first, last=last)
    total = before + after + sum(u.parameters for u in blocks)
    experts = sum(u.experts for u in blocks)
    forward = _forward([*blocks, *ends])
    backward = _backward(blocks, ends, recomputes, data)
    first_forward: dict[str, float] = {}
    last_backward: dict[str, float] = {}
    sharing = WeightCommunication(
        before=CommUnit(before),
        after=CommUnit(after),
        blocks=[CommUnit.of(u) for u in blocks],
        windows_forward_s=[*map(window_forward_s, blocks)],
        windows_backward_s=[window_backward_s(u, kind, data) for u, kind in zip(blocks, recomputes, strict=True)][::-1],
        held=StageParameters(total - experts, experts, first),
        data=data,
        network=network,
    )
    sharing.add_gathers(forward, backward, first_forward, bytes_per_s)
    if data.traits.gathers_at_start and not first:
        first_forward["weight_gather"] = 0.0  # done while the pipeline fills
    sharing.add_reductions(backward, last_backward, bytes_per_s, passes_behind)
    everything = [*blocks, *ends]
    weights_s = sum(u.times.weight_gradient.device_s for u in everything)
    weight_gradient = {"weight_gradient": weights_s}
    rest = {part: seconds for part, seconds in backward.items() if part != "backward"}
    # Tensor-parallel collectives have no weight gradients to hide behind where those wait.
    rest["tensor_parallel"] += sum(u.tensor_backward_s - tensor_backward_s(u, data.tensor_overlap) for u in everything)
    input_gradient = {"input_gradient": backward["backward"] - weights_s, **rest}
    collectives, own = (
        sum(u.tensor_launches for u in everything),
        (len(blocks) + 1) * data.traits.host_operators_per_unit / 2,
    )
    again = sum(recomputed(u, kind).launches for u, kind in zip(blocks, recomputes, strict=True))
    of_inputs = sum(u.times.input_gradient.launches for u in everything) + again + collectives
    of_weights = sum(u.times.weight_gradient.launches for u in everything)
    _add_host(forward, sum(u.times.forward.launches for u in everything) + collectives, own, data)
    _add_host(backward, of_inputs + of_weights, own, data)
    _add_host(input_gradient, of_inputs, own, data)
    _add_host(weight_gradient, of_weights, 0.0, data)
    last_weight_gradient = _beyond_host(last_backward, data, input_gradient, weight_gradient)
    first_forward = _beyond_host(first_forward, data, forward)
    last_backward = _beyond_host(last_backward, data, backward)
    return StageCost(
        forward,
        backward,
        input_gradient,
        weight_gradient,
        first_forward,
        last_backward,
        last_weight_gradient,
    )


def recomputed(unit: Unit, recompute: Recompute) -> Work:
    """What of a block's forward pass runs a second time."""
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


def _forward(everything: list[Unit]) -> dict[str, float]:
    return {
        "forward": sum(u.times.forward_s for u in everything),
        "tensor_parallel": sum(u.tensor_forward_s for u in everything),
        "context_parallel": sum(u.context_forward_s for u in everything),
        "expert_parallel": sum(u.expert_s for u in everything),
    }


def _backward(
    blocks: list[Unit], ends: list[Unit], recomputes: list[Recompute], data: DataParallel
) -> dict[str, float]:
    """``recomputes``: of each block."""
    everything = [*blocks, *ends]
    parts = {
        "backward": sum(u.times.backward_s for u in everything),
        "tensor_parallel": sum(tensor_backward_s(u, data.tensor_overlap) for u in everything),
        "context_parallel": sum(u.context_backward_s for u in everything),
        "expert_parallel": sum(u.expert_s for u in everything),
    }
    if any(kind != "none" for kind in recomputes):
        parts["recompute"] = sum(work.device_s for work in map(recomputed, blocks, recomputes))
    whole = [u for u, kind in zip(blocks, recomputes, strict=True) if kind in OF_INPUT]
    for unit, kind in zip(blocks, recomputes, strict=True):
        tensor_s, context_s = sent_again_s(unit, kind, data)
        parts["tensor_parallel"] += tensor_s
        parts["context_parallel"] += context_s
    parts["expert_parallel"] += sum(u.expert_s for u in whole)
    return parts


def sent_again_s(unit: Unit, recompute: Recompute, data: DataParallel) -> tuple[float, float]:
    """Seconds of the collectives of a block's forward that run a second time, those of tensor and of context parallelism."""
    if recompute == "none":
        return 0.0, 0.0
    if recompute == "full":
        return unit.tensor_forward_s, unit.context_forward_s
    if recompute == "read":
        return unit.tensor_again_s, unit.context_forward_s
    again = data.traits.selective_sends_again
    if again == "all":
        return unit.tensor_again_s, unit.context_again_s
    return unit.tensor_gather_s if again == "gathers" else 0.0, 0.0


def tensor_backward_s(unit: Unit, overlap: float) -> float:
    """What the products for the weight gradients do not hide; ``overlap``: the share of it that they may."""
    beside = unit.times.weight_gradient.device_s
    return shown_s(unit.tensor_backward_s, beside, overlap)


def _add_host(parts: dict[str, float], launches: float, own_launches: float, data: DataParallel) -> None:
    """Time that the device waits for the host. On a CPU the operators hold their own launch, the engine's is added;
    a GPU waits where all launches of a pass take longer than what they launch."""
    if data.host_is_device:
        parts["host"] = own_launches * data.operator_s
        return
    host_s = (launches * data.traits.host_launches_per_operator + own_launches) * data.operator_s
    parts["host"] = max(0.0, host_s - sum(parts.values()))


def _beyond_host(once: dict[str, float], data: DataParallel, *passes: dict[str, float]) -> dict[str, float]:
    """What comes once per step runs while the device waits for the host in its pass, which is as long as the longer of the two."""
    total_s = sum(once.values())
    if data.host_is_device or total_s == 0.0:
        return once
    share = max(0.0, 1.0 - sum(parts["host"] for parts in passes) / total_s)
    return {part: share * seconds for part, seconds in once.items()}


def segment_forward_s(unit: Unit) -> float:
    """Device seconds of one segment's forward pass."""
    return unit.times.forward_s + unit.tensor_forward_s + unit.context_forward_s + unit.expert_s


def segment_backward_s(unit: Unit, tensor_overlap: float) -> float:
    """The same of its backward pass, without what it computes again."""
    return unit.times.backward_s + tensor_backward_s(unit, tensor_overlap) + unit.context_backward_s + unit.expert_s


def segment_again_s(unit: Unit, recompute: Recompute, data: DataParallel) -> float:
    """Device seconds of a backward pass that compute and send again what was not kept."""
    experts_s = unit.expert_s if recompute in OF_INPUT else 0.0
    return recomputed(unit, recompute).device_s + sum(sent_again_s(unit, recompute, data)) + experts_s


def window_forward_s(unit: Unit) -> float:
    """Seconds that a block gives collectives of weights to hide behind.

    It computes, and waits for its tensor-parallel ranks. What a ring's messages hide behind is theirs: they go over the
    same network cards.
    """
    return unit.times.forward_s + unit.tensor_forward_s - unit.context_hidden_s[0]


def window_backward_s(unit: Unit, recompute: Recompute, data: DataParallel) -> float:
    """The same of the backward pass."""
    again_s = recomputed(unit, recompute).device_s + sent_again_s(unit, recompute, data)[0]
    again_s -= unit.context_hidden_s[0] if recompute in OF_INPUT else 0.0
    return unit.times.backward_s + tensor_backward_s(unit, data.tensor_overlap) + again_s - unit.context_hidden_s[1]


def dropped_bytes(unit: Unit, units: Units, recompute: Recompute) -> int:
    """What a block keeps less for being recomputed; below 0 where the results that are kept are more than what backward needs."""
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
    """Bytes of what one block makes again before its backward pass."""
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
