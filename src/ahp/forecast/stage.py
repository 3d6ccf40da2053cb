"""What one pipeline stage costs: the times the schedule needs, part by part, and what it keeps in memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ahp.engines.engine import Traits
from ahp.forecast.communication import Group, Kind, Times
from ahp.forecast.compute import Work
from ahp.forecast.overlap import exposed_ahead_s, exposed_behind_s, hidden_s, shown_s
from ahp.forecast.unit import Unit
from ahp.forecast.units import ALONE, Units


class Weights(NamedTuple):
    """Elements of one unit of communication on one rank."""

    dense: int
    experts: int = 0
    tensors: int = 1
    """Weights that it consists of."""

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @classmethod
    def of(cls, unit: Unit) -> Weights:
        return cls(unit.parameters - unit.experts, unit.experts, unit.tensors)


@dataclass(frozen=True)
class DataParallel:
    """The groups over which a rank's weights are sharded and replicated, and what goes over them."""

    shard: Group
    replicate: Group
    traits: Traits
    micro_batches: int
    overlap: float
    """Share of a collective that can hide behind computation on this device: 0 on a CPU."""
    experts: tuple[Group, Group] = (ALONE, ALONE)
    """The same two groups for the weights of experts, which an expert-parallel group has once."""
    operator_s: float = 0.0
    """Host time of one operator."""
    host_is_device: bool = False
    """Whether operators wait for the host one by one (a CPU), instead of running behind it."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight element as it is gathered."""
        return self.traits.compute_weight_bytes or self.traits.master_weight_bytes

    def gather_s(self, weights: Weights, network: Times) -> float:
        return sum(
            self._sent_s("all_gather", count, self.weight_bytes, shard, weights, network)
            for count, shard, _ in self._parts(weights)
        )

    def reduce_s(self, weights: Weights, network: Times) -> float:
        """Over the shard group; where nothing is sharded, over the replicas."""
        seconds = 0.0
        for count, shard, replicate in self._parts(weights):
            kind, group = ("reduce_scatter", shard) if self.shard.size > 1 else ("all_reduce", replicate)
            seconds += self._sent_s(kind, count, self.traits.reduce_bytes, group, weights, network)
        return seconds

    def replicas_s(self, weights: Weights, network: Times) -> float:
        """The second step of a hybrid: the shard is summed over the replicas, once per step."""
        if self.shard.size == 1:
            return 0.0
        return sum(
            network.time_s("all_reduce", count * self.traits.reduce_bytes / shard.size, replicate)
            for count, shard, replicate in self._parts(weights)
        )

    def _sent_s(self, kind: Kind, count: int, each_bytes: int, group: Group, weights: Weights, network: Times) -> float:
        """One collective for a unit, one for each of its tensors, or the unit's share of one for many units."""
        if together := self.traits.sends_elements_together:
            return count / together * network.time_s(kind, together * each_bytes, group)
        pieces = weights.tensors if self.traits.gathers_each_weight else 1
        return pieces * network.time_s(kind, count * each_bytes / pieces, group)

    def _parts(self, weights: Weights) -> list[tuple[int, Group, Group]]:
        """What is held by how many ranks alike: (elements, shard group, replicas)."""
        parts = [(weights.dense, self.shard, self.replicate)]
        return [*parts, (weights.experts, *self.experts)] if weights.experts else parts


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
    parameters: int
    experts: int
    """Of the parameters, those of experts."""
    kept_bytes: int
    """Activations of one micro-batch between its forward and its backward."""
    temporary_bytes: int
    """At the peak of one backward pass, beyond those."""

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The first seven, summed over their parts."""
        passes = self.forward, self.backward, self.input_gradient, self.weight_gradient
        once = self.first_forward, self.last_backward, self.last_weight_gradient
        return tuple(sum(parts.values()) for parts in (*passes, *once))


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
) -> StageCost:
    """Price the stage that holds ``layers``, the embedding if ``first``, the head if ``last``.

    ``recomputed_layers``: so many of its first layers are recomputed; None = all.
    """
    blocks = [units.blocks[units.layers[i]] for i in layers]
    some = len(blocks) if recomputed_layers is None else recomputed_layers
    recomputes: list[Recompute] = [recompute if i < some else "none" for i in range(len(blocks))]
    ends = ([units.embedding] if first else []) + ([units.head] if last else [])
    outside = sum(u.parameters for u in ends) + (units.tied_parameters if last and not first else 0)
    total = outside + sum(u.parameters for u in blocks)
    experts = sum(u.experts for u in blocks)
    forward = _forward([*blocks, *ends])
    backward = _backward(blocks, ends, recomputes, data)
    first_forward: dict[str, float] = {}
    last_backward: dict[str, float] = {}
    # FSDP2's units in the order of the forward pass: what is in no block is one unit, and it comes first.
    sizes = [Weights(outside), *(Weights.of(u) for u in blocks)]
    _add_gathers(forward, backward, first_forward, sizes, blocks, recomputes, data, network, bytes_per_s)
    if data.traits.gathers_at_start and not first:
        first_forward["weight_gather"] = 0.0  # done while the pipeline fills
    _add_reductions(backward, last_backward, sizes, blocks, recomputes, data, network, bytes_per_s)
    everything = [*blocks, *ends]
    weights_s = sum(u.times.weight_gradient.device_s for u in everything)
    weight_gradient = {"weight_gradient": weights_s}
    rest = {part: seconds for part, seconds in backward.items() if part != "backward"}
    # Tensor-parallel collectives have no weight gradients to hide behind where those wait.
    rest["tensor_parallel"] += sum(u.tensor_backward_s - tensor_backward_s(u, data) for u in everything)
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
    kept, temporary = _activations(units, blocks, recomputes, first=first, last=last)
    return StageCost(
        forward,
        backward,
        input_gradient,
        weight_gradient,
        first_forward,
        last_backward,
        last_weight_gradient,
        total,
        experts,
        kept,
        temporary,
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
        "tensor_parallel": sum(tensor_backward_s(u, data) for u in everything),
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


def tensor_backward_s(unit: Unit, data: DataParallel) -> float:
    """What the products for the weight gradients do not hide."""
    beside = unit.times.weight_gradient.device_s
    return shown_s(unit.tensor_backward_s, beside, data.overlap * data.traits.tensor_overlap_backward)


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
    return unit.times.backward_s + tensor_backward_s(unit, data) + again_s - unit.context_hidden_s[1]


def _windows_backward(blocks: list[Unit], recomputes: list[Recompute], data: DataParallel) -> list[float]:
    """In the order of the backward pass."""
    each = [window_backward_s(u, kind, data) for u, kind in zip(blocks, recomputes, strict=True)]
    return each[::-1]


def _windows_left(sizes: list[Weights], windows: list[float], data: DataParallel, network: Times) -> list[float]:
    """Of the windows of a backward pass, what gathers of the next block's weights leave to the reductions of gradients: both
    go over the same network cards."""
    if data.traits.backward_gathers != "per_micro_batch":
        return windows
    overlap = data.overlap * data.traits.parameter_gather_overlap
    next_s = [*(data.gather_s(size, network) for size in sizes[-2:0:-1]), 0.0]
    return [own - hidden_s(gather, own, overlap) for own, gather in zip(windows, next_s, strict=False)]


def _add_gathers(
    forward: dict[str, float],
    backward: dict[str, float],
    first_forward: dict[str, float],
    sizes: list[Weights],
    blocks: list[Unit],
    recomputes: list[Recompute],
    data: DataParallel,
    network: Times,
    bytes_per_s: float,
) -> None:
    traits = data.traits
    overlap = data.overlap * traits.parameter_gather_overlap
    gathers = [data.gather_s(size, network) for size in sizes]
    cast_s = sum(w.total for w in sizes) * cast_bytes(data) / bytes_per_s
    each = traits.forward_gathers == "per_micro_batch"
    target = forward if each else first_forward
    # The unit outside the blocks and the first block have nothing before them to hide behind.
    ahead = exposed_ahead_s(gathers[1:], [*map(window_forward_s, blocks)], overlap)
    target["weight_gather"] = gathers[0] + ahead if traits.forward_gathers != "never" else 0.0
    target["casts"] = target.get("casts", 0.0) + cast_s
    if traits.backward_gathers == "per_micro_batch":
        # The unit outside the blocks is kept from forward to backward.
        order = gathers[:0:-1]
        backward["weight_gather"] = exposed_ahead_s(order, _windows_backward(blocks, recomputes, data), overlap)
        backward["casts"] = sum(w.total for w in sizes[1:]) * cast_bytes(data) / bytes_per_s


def _add_reductions(
    backward: dict[str, float],
    last_backward: dict[str, float],
    sizes: list[Weights],
    blocks: list[Unit],
    recomputes: list[Recompute],
    data: DataParallel,
    network: Times,
    bytes_per_s: float,
) -> None:
    traits = data.traits
    overlap = data.overlap * traits.gradient_overlap
    order = sizes[:0:-1] + sizes[:1]
    windows = _windows_backward(blocks, recomputes, data)
    work = [*_windows_left(sizes, windows, data, network), 0.0]
    reduces = [data.reduce_s(size, network) for size in order]
    replicas = [data.replicas_s(size, network) for size in order]
    both = [a + b for a, b in zip(reduces, replicas, strict=True)]
    last_backward["gradient_reduce"] = exposed_behind_s(both, work, overlap)
    if traits.reduces_every_micro_batch:
        backward["gradient_reduce"] = exposed_behind_s(reduces, work, overlap)
        last_backward["gradient_reduce"] -= backward["gradient_reduce"]
    backward["casts"] = (
        backward.get("casts", 0.0) + sum(w.total for w in sizes) * gradient_copy_bytes(data) / bytes_per_s
    )
    if traits.compute_weight_bytes == 0 and traits.reduce_copies:
        last_backward["casts"] = sum(w.total for w in sizes) * 2 * traits.reduce_bytes / bytes_per_s


def cast_bytes(data: DataParallel) -> float:
    """Bytes moved per weight element to make the compute copy: the shard cast, and the gathered buffer copied out."""
    traits, shards = data.traits, data.shard.size
    cast = (traits.master_weight_bytes + traits.compute_weight_bytes) / shards
    copied = 2 * data.weight_bytes if shards > 1 else 0
    return (cast if traits.compute_weight_bytes not in (0, traits.master_weight_bytes) else 0.0) + copied


def gradient_copy_bytes(data: DataParallel) -> float:
    """Bytes moved per weight element and micro-batch: the gradient into the type and buffer it waits in, or is sent from."""
    traits, made = data.traits, data.weight_bytes
    if traits.fused_gradient_accumulation:
        return 0.0
    if traits.reduces_every_micro_batch:
        # Into the flat buffer; then the shard is added to the earlier ones.
        added = 0.0 if data.micro_batches == 1 else 2 * traits.gradient_bytes / data.shard.size
        return made + traits.reduce_bytes + added
    # The first is kept as it is, or cast; each later one is read, and added in one kernel to the sum, which is read and written.
    first = made + traits.gradient_bytes if made != traits.gradient_bytes else 0.0
    later = made + 2 * traits.gradient_bytes
    return (first + (data.micro_batches - 1) * later) / data.micro_batches


def _activations(
    units: Units, blocks: list[Unit], recomputes: list[Recompute], *, first: bool, last: bool
) -> tuple[int, int]:
    """Bytes kept per micro-batch, and the largest further need of one backward pass."""

    kept = units.embedding.memory.saved if first else 0
    kept += units.head.memory.saved if last else 0
    dropped = [dropped_bytes(u, units, kind) for u, kind in zip(blocks, recomputes, strict=True)]
    kept += sum(u.memory.saved for u in blocks) - sum(dropped)
    kept += 0 if last else units.hidden_bytes
    kept += max((u.memory.masks for u, kind in zip(blocks, recomputes, strict=True) if kind != "none"), default=0)
    freed = units.head.memory.saved if last else 0
    again = map(made_again, blocks, recomputes, dropped)
    in_block = [u.memory.backward_extra + more for u, more in zip(blocks, again, strict=True)]
    at_head = max(units.head.memory.forward_extra, units.head.memory.backward_extra) if last else 0
    return kept, max([0, at_head, *(need - freed for need in in_block)])


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
