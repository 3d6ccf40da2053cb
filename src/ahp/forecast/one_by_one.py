"""What Megatron computes by torch's kernels one after another, for want of one that does it all: gpt-oss's positions and the biases of its experts, and in
early releases all positions and gates.

Bytes and addresses are read off Megatron-Core d98e8a6, each operator with its backward pass as torch runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ahp.forecast.division import GROUPED
from ahp.forecast.joined import activations_of_gates, products_before_attention
from ahp.graph.operators import Operator, Phase, Segment

SINKS = "sinks"
"""Parameters that attention has in gpt-oss alone, whose positions YaRN scales."""

TURNED_BYTES, TURNED_ADDRESSES = (20.0, 30.0), (4.5, 3.5)
"""Forward and backward, for each element of queries and keys: bytes beyond the 4 of one kernel, and addresses that are computed one by one (a product
with what repeats, ``cat``, a negated half). models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd: 24 and 34 bytes."""

BIASED_BYTES, BIASED_ADDRESSES = 34.0, 3.5
"""For each element of the experts' results, in each pass: 28 bytes forward and 40 backward, with probabilities in fp32 (transformer/moe/experts.py,
_apply_bias: a product, a sum, ``cat`` and a cast, and what their gradients move)."""

GATE_TENSORS = (3.0, 2.5)
"""Tensors as large as the result that the activation between two products of experts reads and writes: forward the two halves and the result, backward
five halves for a result of two (fusions/fused_bias_geglu.py). The first product adds its own bias."""

GATE_APART_BYTES = (4.0, 16.0)
"""For each element of a gate's result, forward and backward: bytes beyond the 6 and 10 of one kernel (core/transformer/mlp.py, glu: activation and
product move 10; two products, the activation's gradient and ``cat`` of both halves 26)."""


class OneByOne(NamedTuple):
    """By operator."""

    moved_bytes: Mapping[int, float]
    """Bytes in place of the traced ones."""
    more_bytes: Mapping[int, float]
    """Bytes besides them."""
    addresses: Mapping[int, float]
    """Elements whose addresses a GPU computes one by one."""
    saved_bytes: Mapping[int, float]
    """Bytes that are kept until backward besides what is kept otherwise."""


def one_by_one(
    segment: Segment, owner: Mapping[int, int], *, positions: bool, scaled: bool, biased: bool, gates: bool
) -> OneByOne:
    """``positions``, ``scaled``, ``biased``, ``gates``: whether all positions, those that YaRN scales, biases of experts, and gates are such kernels.
    ``owner``: who made the memory of each output."""
    moved, addresses = _of_experts(segment, owner) if biased else ({}, {})
    more, saved = dict[int, float](), dict[int, float]()
    if positions or (scaled and any(p.name.endswith(SINKS) for p in segment.parameters)):
        for op, bytes_of_each, of_each in turned(segment, owner, TURNED_BYTES, TURNED_ADDRESSES):
            more[op.index] = bytes_of_each * op.outputs[0].numel
            addresses[op.index] = of_each * op.outputs[0].numel
    for activation in activations_of_gates(segment, owner) if gates else ():
        made = activation.outputs[0]
        saved[activation.index] = float(made.bytes)
        back = (op for op in segment.phase("backward") if op.name == f"{activation.name}_backward")
        given = next((op for op in back if op.module == activation.module), None)
        for op, bytes_of_each in zip((activation, given), GATE_APART_BYTES, strict=True):
            if op is not None:
                more[op.index] = bytes_of_each * made.numel
    return OneByOne(moved, more, addresses, saved)


def turned(
    segment: Segment, owner: Mapping[int, int], bytes_of_each: tuple[float, float], of_each: tuple[float, float]
) -> list[tuple[Operator, float, float]]:
    """The operators that end the rotation of queries and keys, and that of their gradients, with bytes and addresses of each element, by pass."""
    ops, products = segment.operators, products_before_attention(segment, owner)[:2]
    if not products:  # attention in parts
        return []
    attention = next(op for op in segment.phase("forward") if "attention" in op.name)
    forward = [ops[i] for i in dict.fromkeys(owner[i] for i in attention.depends_on) if ops[i].flops == 0]
    names = {name for op in products for name in op.parameters}
    gradients = (op for op in segment.phase("backward") if op.flops > 0 and names & set(op.parameters))
    given = dict.fromkeys(owner[i] for op in gradients for i in op.depends_on if not ops[i].parameters)
    backward = [ops[i] for i in given if ops[i].flops == 0]
    passes = zip((forward, backward), bytes_of_each, of_each, strict=True)
    return [(op, moved, addresses) for found, moved, addresses in passes for op in found]


def _of_experts(segment: Segment, owner: Mapping[int, int]) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes and addresses of experts whose last product has a bias; none where it has none."""
    moved, addresses = dict[int, float](), dict[int, float]()
    phases: tuple[Phase, Phase] = ("forward", "backward")
    grouped: dict[Phase, list[Operator]] = {
        phase: [op for op in segment.phase(phase) if op.name in GROUPED] for phase in phases
    }
    if not grouped["forward"]:
        return moved, addresses
    module, last = grouped["forward"][0].module, grouped["forward"][-1].index
    biases = {
        op.index
        for op in segment.phase("forward")
        if op.module == module and op.flops == 0 and op.parameters and op.bytes_written > 0
    }
    added = next((op for op in segment.phase("forward") if last in op.depends_on and biases & set(op.depends_on)), None)
    if added is None:
        return moved, addresses
    moved = dict.fromkeys(biases, 0.0)
    for (phase, products), tensors in zip(grouped.items(), GATE_TENSORS, strict=True):
        first, end = products[0].index, products[-1].index
        between = [
            op
            for op in segment.phase(phase)
            if first < op.index < end and op.module == module and op.flops == 0 and not op.parameters
        ]
        read = {owner[i] for op in products[1:] for i in op.depends_on}
        result = next((op for op in reversed(between) if op.index in read and op.bytes_written > 0), None)
        if result is None:  # one product, or an activation in a module of its own
            continue
        moved |= {op.index: 0.0 for op in between if 2 * op.outputs[0].numel >= result.outputs[0].numel}
        moved[result.index] = tensors * result.outputs[0].bytes
    moved[added.index] = BIASED_BYTES * added.outputs[0].numel
    addresses[added.index] = BIASED_ADDRESSES * added.outputs[0].numel
    return moved, addresses
