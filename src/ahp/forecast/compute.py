"""How long the operators of a segment take on one device."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.forecast.efficiency import Rates
from ahp.forecast.split import Split
from ahp.forecast.tables import PRECISION_OF
from ahp.graph.operators import DTYPE_BYTES, ModelGraph, Operator, Segment

EXPONENTIAL = ("softmax", "silu", "gelu", "sigmoid", "tanh", "exp", "logsumexp", "erf")
"""Element-wise operators that take an exponential (or as much arithmetic) of every element, by a part of their name."""

BATCHED = ("aten.bmm", "aten.baddbmm")


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """Seconds of computation of one segment on one micro-batch."""

    forward_s: float
    backward_s: float


def is_causal(graph: ModelGraph) -> bool:
    """Whether attention looks back only: a model whose loss shifts the labels predicts the next token.

    torch counts the FLOPs of fused attention over the whole square of scores; a causal kernel does half of them.
    """
    return any(op.name == "aten.constant_pad_nd" and op.module == "loss" for op in graph.head.operators)


def segment_times(
    segment: Segment, split: Split, rates: Rates, *, degree: int, causal: bool, fused: bool
) -> SegmentTimes:
    """Forward and backward time of a segment on one rank of a tensor-parallel group of ``degree``.

    Every operator takes max(FLOPs / reached FLOP/s, bytes / reached bytes/s) and its launch. ``fused``: chains of
    element-wise operators run as one kernel, what passes between them stays in registers.
    """
    skipped = _inner_bytes(segment) if fused else {}
    times = {"forward": 0.0, "backward": 0.0}
    for op in segment.operators:
        times[op.phase] += operator_s(
            op, split, rates, degree=degree, causal=causal, skipped_bytes=skipped.get(op.index)
        )
    return SegmentTimes(times["forward"], times["backward"])


def operator_s(
    op: Operator, split: Split, rates: Rates, *, degree: int = 1, causal: bool = False, skipped_bytes: int | None = None
) -> float:
    """Seconds of one operator. ``skipped_bytes``: bytes that a fused kernel does not move; None = it is not fused."""
    moved = op.bytes_read + op.bytes_written
    if moved == 0 and op.flops == 0:
        return 0.0  # a view, or memory reserved: nothing runs on the device
    share = split.share(op.index, degree)
    launch_s = rates.device.kernel_launch_s
    if op.flops == 0:
        elements = max((spec.numel for spec in op.outputs), default=0)
        exponentials = elements * share if _is_exponential(op) else 0.0
        left = moved - (skipped_bytes or 0)
        busy_s = rates.element_wise_s(left * share, exponentials, _dtype(op))
        return busy_s + (launch_s if left > 0 else 0.0)
    precision = PRECISION_OF.get(op.inputs[0].dtype, "fp32")
    if "attention" in op.name:
        flops = op.flops * share * (0.5 if causal else 1.0)
        sequence, head_dim = op.inputs[0].shape[-2:]
        busy_s = rates.attention_s(flops, sequence, head_dim, precision, backward=op.phase == "backward")
        return max(busy_s, moved * share / rates.bytes_per_s) + launch_s
    batch, m, n, k = _local_shape(op, split, degree)
    moved = batch * (m * k + k * n + m * n) * DTYPE_BYTES[op.inputs[0].dtype] if share < 1 else moved
    return max(rates.matmul_s(batch, m, n, k, precision), moved / rates.bytes_per_s) + launch_s


def _is_exponential(op: Operator) -> bool:
    name = op.name.removeprefix("aten.")
    return any(part in name for part in EXPONENTIAL) and "expand" not in name


def _dtype(op: Operator) -> str:
    """The dtype of its largest tensor: a cast or a sum works at the pace of what it reads."""
    return max((*op.inputs, *op.outputs), key=lambda spec: spec.numel).dtype


def _local_shape(op: Operator, split: Split, degree: int) -> tuple[float, float, float, float]:
    """(batch, m, n, k) of the products one rank computes; from the output's shape and the FLOPs."""
    out = op.outputs[0]
    n = out.shape[-1] if out.shape else 1
    batch = 1
    if op.name in BATCHED:
        batch = out.shape[0]
    m = out.numel / (batch * n)
    k = op.flops / (2.0 * out.numel)
    if degree == 1 or op.index not in split.divided:
        return batch, m, n, k
    if op.index in split.contracted:
        return batch, m, n, k / degree
    if op.parameters:
        return batch, m, n / degree, k
    if batch % degree == 0 and batch > 1:
        return batch / degree, m, n, k
    # A weight gradient: its larger side is the one that is split, as far as the time is concerned.
    return (batch, m / degree, n, k) if m > n else (batch, m, n / degree, k)


def _inner_bytes(segment: Segment) -> dict[int, int]:
    """By element-wise operator: bytes that it shares only with other element-wise operators of its phase."""
    element_wise = {op.index: op for op in segment.operators if op.flops == 0 and op.bytes_written > 0}
    readers: dict[int, list[int]] = {op.index: [] for op in segment.operators}
    for op in segment.operators:
        for i in op.depends_on:
            readers[i].append(op.index)
    skipped: dict[int, int] = dict.fromkeys(element_wise, 0)
    for index, op in element_wise.items():
        inner = [r for r in readers[index] if r in element_wise and element_wise[r].phase == op.phase]
        if op.saved_bytes == 0 and inner and len(inner) == len(readers[index]):
            skipped[index] += op.bytes_written
        for reader in inner:
            skipped[reader] += min(op.bytes_written, element_wise[reader].bytes_read)
    return {i: min(count, element_wise[i].bytes_read + element_wise[i].bytes_written) for i, count in skipped.items()}
