"""Where the bytes of a rank go, and how likely they are to fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ahp.cluster.model import Device
from ahp.engines.engine import Traits
from ahp.forecast import margins
from ahp.forecast.compute import core_attention
from ahp.forecast.division import Division, is_weight_gradient
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.kernels import Kernels, owners
from ahp.forecast.selective import asked_for, kept_results, second_products
from ahp.forecast.split import Split, is_mask
from ahp.graph.operators import Operator, Segment

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Policy:
    """Bytes under a policy that keeps the results of some operators, needed or not, and runs all others again."""

    kept: int
    """The results, without what enters the segment."""
    made_again: int
    """Of what the backward pass needs, what is not among them."""


NOTHING = Policy(0, 0)
"""Of what is not in a block, and so never recomputed."""


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """Bytes of activations of one segment and one micro-batch on one rank."""

    saved: int
    """Kept from forward to backward."""
    saved_in_core: int
    """Of it, what unfused attention keeps between its two products."""
    saved_in_chains: int
    """Of it, what element-wise operators keep."""
    beside_products: Policy
    """Where the results of products with a weight and of fused attention are kept."""
    every_second_product: Policy
    """Where those of the first, third, ... product with a weight are, and those of fused attention."""
    masks: int
    """Of what it is given beside the hidden states, masks: every layer reads the same, and a second run needs them."""
    forward_extra: int
    """At the peak of its forward pass, beyond what it keeps."""
    backward_extra: int
    """At the peak of its backward pass, beyond what it kept."""


def segment_memory(
    segment: Segment, kernels: Kernels, division: Division, *, fp8: bool = False, keeps_gathered: bool = False
) -> SegmentMemory:
    """What one rank of the groups that ``division`` describes holds of a segment; see ``Held``."""
    return Held(segment, kernels, division.split, fp8=fp8).on(division, keeps_gathered=keeps_gathered)


class Held:
    """A run through a segment's operators, tensor by tensor: made when its operator runs, freed after its last use.

    Gradients of parameters are left out (they are counted with the parameters), gradients of what enters are in. ``fp8``:
    what weight products read is kept for their weight gradients in 8 bits.

    A rank holds the same share of every output of a kind (C kinds: contracted or divided products, weight gradients, the
    rest), so that bytes are counted by kind once for all divisions.
    """

    def __init__(self, segment: Segment, kernels: Kernels, split: Split, *, fp8: bool = False) -> None:
        self._segment, self._input_bytes = segment, kernels.saved_input_bytes
        owner = owners(segment)
        kinds: dict[tuple[bool, ...], int] = {}
        of = [kinds.setdefault(_kind(op, split), len(kinds)) for op in segment.operators]
        self._one_of = [segment.operators[of.index(kind)] for kind in range(len(kinds))]
        """An operator of each kind."""
        saved = dict(kernels.saved_bytes)
        if fp8:
            saved = {i: count * _in_8_bits(segment, owner, i) for i, count in saved.items()}
        core = core_attention(segment)
        self._masks = _given_masks(segment)

        def by_kind(counts: dict[int, float]) -> Floats:
            return np.bincount([of[i] for i in counts], [*counts.values()], len(kinds)).astype(float)

        self._saved = by_kind(saved)
        """[C] Bytes on one device alone."""
        self._in_core = by_kind({i: count for i, count in saved.items() if i in core})
        self._in_chains = by_kind({i: count for i, count in saved.items() if segment.operators[i].flops == 0})
        self._policies = [
            (
                by_kind({i: sum(spec.bytes for spec in segment.operators[i].outputs) for i in keeps}),
                by_kind({i: count for i, count in saved.items() if i not in keeps}),
            )
            for keeps in _policies(segment, one_graph=kernels.one_graph)
        ]
        """Of each policy, [C] bytes that it keeps, and that are made again."""
        self._live = self._run(kernels, owner, saved, np.eye(len(kinds))[of] if of else np.zeros((0, 1)))

    def _run(self, kernels: Kernels, owner: dict[int, int], saved: dict[int, float], kind: Floats) -> dict[str, Floats]:
        """By pass [operators, C]: bytes while each operator runs; ``kind``: 1 at that of each operator."""
        operators = self._segment.operators
        last_use = {(owner[i], op.phase): op.index for op in operators for i in (*op.depends_on, op.index)}
        frees: dict[int, list[int]] = {}
        for (made_by, phase), at in last_use.items():
            if phase == "backward" or made_by not in saved:
                frees.setdefault(at, []).append(made_by)
        held: dict[int, float] = {}
        found: dict[str, list[Floats]] = {"forward": [], "backward": []}
        live, phase = np.zeros(kind.shape[1]), "forward"
        for op in operators:
            if op.phase != phase:
                phase, held, live = op.phase, dict(saved), self._saved.copy()
            if owner[op.index] == op.index and (phase == "forward" or not _is_gradient(op, last_use)):
                made = kernels.moved_bytes.get(op.index) and (op.flops > 0 or op.index in kernels.launched)
                out_bytes = sum(spec.bytes for spec in op.outputs) if made else 0.0
                held[op.index] = max(out_bytes, saved.get(op.index, 0.0))
                live = live + held[op.index] * kind[op.index]
            found[phase].append(live)
            for made_by in frees.get(op.index, ()):
                live = live - held.pop(made_by, 0.0) * kind[made_by]
        return {phase: np.array(rows).reshape(len(rows), kind.shape[1]) for phase, rows in found.items()}

    def on(self, division: Division, *, keeps_gathered: bool = False) -> SegmentMemory:
        """What a rank holds. ``keeps_gathered``: what sequence parallelism gathers for column products is kept whole."""
        shares = np.array([division.output_share(op) for op in self._one_of], dtype=float)
        shares = shares if len(shares) else np.zeros(len(self._saved))
        output = self._segment.output.bytes * division.hidden_share if self._segment.output else 0
        gathered = division.gathered_bytes if keeps_gathered else 0.0
        kept = float(self._saved @ shares)
        forward = float((self._live["forward"] @ shares).max(initial=0.0))
        backward = float((self._live["backward"] @ shares + output).max(initial=0.0))
        in_chains = float(self._in_chains @ shares)
        policies = [
            Policy(round(float(keeps @ shares)), round(float(again @ shares) + gathered))
            for keeps, again in self._policies
        ]
        return SegmentMemory(
            saved=round(kept + self._input_bytes * division.hidden_share + gathered),
            saved_in_core=round(float(self._in_core @ shares)),
            saved_in_chains=round(in_chains + gathered),
            beside_products=policies[0],
            every_second_product=policies[1],
            masks=self._masks,
            forward_extra=round(max(0.0, forward - kept)),
            backward_extra=round(max(0.0, backward - kept)),
        )


def _given_masks(segment: Segment) -> int:
    """Bytes of the masks that a segment reads and does not make."""
    by_index = {op.index: op for op in segment.operators}
    found = set()
    for op in segment.phase("forward"):
        made = [spec for i in op.depends_on for spec in by_index[i].outputs]
        found |= {spec for spec in op.inputs if is_mask(spec) and spec not in made and not op.parameters}
    return sum(spec.bytes for spec in found)


def _policies(segment: Segment, *, one_graph: bool) -> list[frozenset[int]]:
    """Whose results are kept beside products, and with every second product."""
    results = kept_results(segment)
    policies = [results, results - second_products(segment)]
    return [asked_for(segment, kept) for kept in policies] if one_graph else policies


def _kind(op: Operator, split: Split) -> tuple[bool, ...]:
    """All that ``Division.output_share`` asks of an operator."""
    in_parts = op.index in split.contracted, op.index in split.divided
    in_parts += op.index in split.masks, op.index in split.keys
    return *in_parts, is_weight_gradient(op), op.flops == 0


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
    largest_without_experts: int = 0
    """Of the block that has the most of them, those that are no weights of experts."""

    @property
    def dense(self) -> int:
        """Of the total, those that are no weights of experts."""
        return self.total - self.experts

    def updated(self, shards: int, expert_ranks: int) -> float:
        """Of the total, those that the rank updates: experts are divided by fewer ranks."""
        return self.dense / shards + self.experts / max(1.0, shards / expert_ranks)


def state_bytes(
    weights: RankWeights, traits: Traits, *, shards: int, micro_batches: int, expert_ranks: int = 1
) -> dict[str, int]:
    """Bytes of parameters, optimizer states, gathered weights, gradients and buffers of communication of a rank.

    ``shards``: ranks that divide the states (ZeRO); ``expert_ranks``: of an expert-parallel group.
    """
    total = weights.total
    sent, block = total, weights.largest_block
    if traits.leaves_lone_experts:
        sent, block = weights.dense, weights.largest_without_experts
    gathered = 0
    if shards > 1 or traits.compute_weight_bytes != traits.master_weight_bytes:
        # FSDP2 holds the block it computes and the one it prefetches.
        in_use = max(weights.outside_blocks + 2 * block, traits.gathered_ahead_elements)
        gathered = sent if traits.keeps_gathered_weights else in_use
        gathered = min(gathered, sent) * traits.compute_weight_bytes
    waits_whole = traits.keeps_whole_gradients and micro_batches > 1
    part = weights.updated(shards, expert_ranks)
    no_matrix = weights.outside_blocks / shards + weights.experts / max(1.0, shards / expert_ranks)
    unit = max(block, weights.outside_blocks)
    buffers = 0
    if traits.reduce_copies and traits.reduce_bucket_elements:
        copied = sent if traits.keeps_reduce_buckets else min(sent, traits.reduce_bucket_elements)
        collected = traits.reduce_bucket_elements if traits.collects_in_bucket else 0
        buffers = (copied + collected) * traits.reduce_bytes
    elif traits.reduce_copies:
        # A unit's gradient in the compute copy's type, where there is one, and the flat buffer it is reduced in.
        buffers = unit * (traits.compute_weight_bytes + traits.reduce_bytes)
    if traits.fused_gradient_accumulation:
        # One for each shape of weight, kept from layer to layer (Transformer Engine, get_dummy_wgrad).
        buffers += (weights.shapes + weights.head) * traits.compute_weight_bytes
    return {
        "parameters": math.ceil(part * traits.master_weight_bytes),
        "optimizer_states": math.ceil(part * traits.device_state_bytes + no_matrix * traits.no_matrix_state_bytes),
        "gathered_weights": gathered,
        "gradients": math.ceil(
            (total if waits_whole else part) * (traits.gradient_bytes + traits.gradient_beside_bytes)
        ),
        "reduce_buffers": buffers,
    }


def visiting_bytes(weights: RankWeights, traits: Traits, *, shards: int, expert_ranks: int = 1) -> int:
    """Bytes of states from host memory that are on the device at once while the weights are updated, at most."""
    return math.ceil(min(traits.host_bucket_bytes, weights.updated(shards, expert_ranks) * traits.host_state_bytes))


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


FIT_PROBABILITY = 0.95
"""What ``Forecast.fits`` asks for."""


def fit_probability(total_bytes: float, capacity_bytes: float) -> float:
    """Probability that the real need is within the capacity: the forecast's error is log-normal.

    All ranks of a layout share the formula's error, so the fullest rank decides for all.
    """
    return 0.5 * (1.0 + math.erf(math.log(capacity_bytes / total_bytes) / (need_error() * math.sqrt(2.0))))


def need_error() -> float:
    """Standard error of the log of a rank's need: of what its tensors take, and of what the allocator adds to them."""
    return math.hypot(margins.value("allocated_error"), margins.value("reserved_error"))
