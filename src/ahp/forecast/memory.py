"""Where the bytes of a rank go, and how likely they are to fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ahp.cluster.model import Device
from ahp.engines.engine import Traits
from ahp.forecast import margins
from ahp.forecast.compute import core_attention
from ahp.forecast.division import Division, is_weight_gradient
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.kernels import Kernels, owners
from ahp.graph.operators import Operator, Segment


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """Bytes of activations of one segment and one micro-batch on one rank."""

    saved: int
    """Kept from forward to backward."""
    saved_in_core: int
    """Of it, what unfused attention keeps between its two products."""
    saved_in_chains: int
    """Of it, what element-wise operators keep."""
    forward_extra: int
    """At the peak of its forward pass, beyond what it keeps."""
    backward_extra: int
    """At the peak of its backward pass, beyond what it kept."""


def segment_memory(
    segment: Segment, kernels: Kernels, division: Division, *, fp8: bool = False, keeps_gathered: bool = False
) -> SegmentMemory:
    """Run through the segment's operators, tensor by tensor: made when its operator runs, freed after its last use.

    Gradients of parameters are left out (they are counted with the parameters), gradients of what enters are in. ``fp8``:
    what weight products read is kept for their weight gradients in 8 bits. ``keeps_gathered``: what sequence parallelism
    gathers for column products is kept whole.
    """
    owner = owners(segment)
    shares = {op.index: division.output_share(op) for op in segment.operators}
    saved = {i: count * shares[i] for i, count in kernels.saved_bytes.items()}
    if fp8:
        saved = {i: count * _in_8_bits(segment, owner, i) for i, count in saved.items()}
    core = core_attention(segment)
    in_core = sum(count for i, count in saved.items() if i in core)
    in_chains = sum(count for i, count in saved.items() if segment.operators[i].flops == 0)
    input_bytes = kernels.saved_input_bytes * division.hidden_share
    gathered = division.gathered_bytes if keeps_gathered else 0.0
    last_use = {(owner[i], op.phase): op.index for op in segment.operators for i in (*op.depends_on, op.index)}
    frees: dict[int, list[int]] = {}
    for (made_by, phase), at in last_use.items():
        if phase == "backward" or made_by not in saved:
            frees.setdefault(at, []).append(made_by)
    held: dict[int, float] = {}
    peak = {"forward": 0.0, "backward": 0.0}
    kept, live, phase = sum(saved.values()), 0.0, "forward"
    for op in segment.operators:
        if op.phase != phase:
            phase, held = op.phase, dict(saved)
            live = kept + (segment.output.bytes * division.hidden_share if segment.output else 0)
        if owner[op.index] == op.index and (phase == "forward" or not _is_gradient(op, last_use)):
            made = kernels.moved_bytes.get(op.index) and (op.flops > 0 or op.index in kernels.launched)
            out_bytes = sum(spec.bytes for spec in op.outputs) * shares[op.index] if made else 0.0
            held[op.index] = max(out_bytes, saved.get(op.index, 0.0))
            live += held[op.index]
        peak[phase] = max(peak[phase], live)
        live -= sum(held.pop(made_by, 0.0) for made_by in frees.get(op.index, ()))
    return SegmentMemory(
        saved=round(kept + input_bytes + gathered),
        saved_in_core=round(in_core),
        saved_in_chains=round(in_chains + gathered),
        forward_extra=round(max(0.0, peak["forward"] - kept)),
        backward_extra=round(max(0.0, peak["backward"] - kept)),
    )


def _is_gradient(op: Operator, last_use: dict[tuple[int, str], int]) -> bool:
    """Whether a backward operator makes the gradient of a parameter: nothing, or nothing but a view, reads it."""
    return is_weight_gradient(op) or last_use[op.index, "backward"] == op.index


def _in_8_bits(segment: Segment, owner: dict[int, int], index: int) -> float:
    """What is left of a kept 16-bit tensor when weight gradients read it in 8 bits: half, or half more for other readers."""
    readers = [
        op for op in segment.phase("backward") if any(owner[i] == index for i in op.depends_on) and op.bytes_written
    ]
    by_weights = [is_weight_gradient(op) for op in readers]
    if not any(by_weights):
        return 1.0
    return 0.5 if all(by_weights) else 1.5


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Parameters (elements) that one pipeline rank holds after tensor parallelism, before sharding over data ranks."""

    total: int
    largest_block: int
    outside_blocks: int
    """In the one unit that holds what is not in a block: embedding, head, final norm."""
    head: int = 0
    """Of them, those of the head."""
    experts: int = 0
    """Of the total, weights of experts: an expert-parallel group holds them once, so that fewer ranks divide their states."""
    shapes: int = 0
    """One weight of each shape in a block, of the block where they are the most: experts have the same shapes."""


def state_bytes(
    weights: RankWeights, traits: Traits, *, shards: int, micro_batches: int, expert_ranks: int = 1
) -> dict[str, int]:
    """Bytes of parameters, optimizer states, gathered weights, gradients and buffers of communication of a rank.

    ``shards``: ranks that divide the states (ZeRO); ``expert_ranks``: of an expert-parallel group.
    """
    total = weights.total
    gathered = 0
    if shards > 1 or traits.compute_weight_bytes != traits.master_weight_bytes:
        # FSDP2 holds the block it computes and the one it prefetches.
        gathered = total if traits.keeps_gathered_weights else weights.outside_blocks + 2 * weights.largest_block
        gathered = min(gathered, total) * traits.compute_weight_bytes
    waits_whole = traits.keeps_whole_gradients and micro_batches > 1
    part = (total - weights.experts) / shards + weights.experts / max(1.0, shards / expert_ranks)
    unit = max(weights.largest_block, weights.outside_blocks)
    # A unit's gradient in the compute copy's type, where there is one, and the flat buffer it is reduced in.
    buffers = unit * (traits.compute_weight_bytes + traits.reduce_bytes) if traits.reduce_copies else 0
    if traits.fused_gradient_accumulation:
        # One for each shape of weight, kept from layer to layer (Transformer Engine, get_dummy_wgrad).
        buffers += (weights.shapes + weights.head) * traits.compute_weight_bytes
    return {
        "parameters": math.ceil(part * traits.master_weight_bytes),
        "optimizer_states": math.ceil(part * traits.optimizer_state_bytes),
        "gathered_weights": gathered,
        "gradients": math.ceil((total if waits_whole else part) * traits.gradient_bytes),
        "reduce_buffers": buffers,
    }


@dataclass(frozen=True)
class RankMemory:
    """All parts of one rank, in bytes; ``parts`` adds up to what the device must have."""

    parts: dict[str, int]
    allocated: int
    reserved: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def rank_memory(parts: dict[str, int], device: Device, num_groups: int) -> RankMemory:
    """Add what the allocator, the context and the communicators of ``num_groups`` process groups hold."""
    allocated = sum(parts.values())
    slack = round(allocated * (margins.value("reserved_over_allocated") - 1))
    outside = {
        "allocator_slack": slack,
        "communicators": 0 if is_cpu(device) else round(num_groups * margins.value("communicator_bytes")),
        "context": device.reserved_memory_bytes,
    }
    return RankMemory({**parts, **outside}, allocated, allocated + slack)


def fit_probability(total_bytes: float, capacity_bytes: float) -> float:
    """Probability that the real need is within the capacity: the forecast's error is log-normal.

    All ranks of a layout share the formula's error, so the fullest rank decides for all.
    """
    return 0.5 * (1.0 + math.erf(math.log(capacity_bytes / total_bytes) / (need_error() * math.sqrt(2.0))))


def need_error() -> float:
    """Standard error of the log of a rank's need: of what its tensors take, and of what the allocator adds to them."""
    return math.hypot(margins.value("allocated_error"), margins.value("reserved_error"))
