"""How long one operator of a segment takes on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ahp.engines.fp8 import Fp8Recipe
from ahp.forecast.division import BATCHED, GROUPED, Division, is_weight_gradient, product_bytes, product_phase
from ahp.forecast.efficiency import Rates, kind_of
from ahp.forecast.gpu import AttentionKernel, ElementWiseKind
from ahp.forecast.kernels import Kernels, owners
from ahp.forecast.tables import PRECISION_OF
from ahp.graph.operators import Operator, Segment

EXPONENTIAL = ("softmax", "silu", "gelu", "sigmoid", "tanh", "exp", "logsumexp", "erf")
"""Element-wise operators that take an exponential (or as much arithmetic) of every element, by a part of their name."""

CAST_BYTES = 4
"""Bytes moved per 16-bit element that a fused kernel casts to 8 bits: it reads the element, and writes it in both memory orders."""

BEFORE_MASK = {"forward": 3, "backward": 6}
"""Tensors that fused attention reads before its mask: queries, keys and values; and the gradient, these, the output and the sums of its rows."""


def reads_mask(op: Operator) -> bool:
    """Whether fused attention gets a mask for each query, of documents or of a sliding window; where documents start is one row for all."""
    if "attention" not in op.name or len(op.inputs) <= (before := BEFORE_MASK[op.phase]):
        return False
    return len(op.inputs[before].shape) > 1 and op.inputs[before].shape[-2] > 1


@dataclass(frozen=True, slots=True)
class Moves:
    """An operator that only moves data, with what it moves on one device alone."""

    moved_bytes: float
    exponentials: int
    """Elements of which it takes an exponential."""
    dtype: str
    kind: ElementWiseKind
    unvectorized: float
    """Elements whose addresses a GPU computes one by one."""
    launched: bool

    @classmethod
    def of(cls, op: Operator, kernels: Kernels) -> Moves:
        exponentials = max((spec.numel for spec in op.outputs), default=0) if _is_exponential(op) else 0
        moved, launched = kernels.moved_bytes.get(op.index, 0.0), op.index in kernels.launched
        slow = kernels.unvectorized.get(op.index, 0.0)
        return cls(moved, exponentials, _dtype(op), kind_of(op.name), slow, launched)

    def seconds(self, share: float, rates: Rates) -> float:
        """Seconds on a rank that does ``share`` of the operator."""
        busy_s = rates.element_wise_s(
            self.moved_bytes * share,
            self.exponentials * share,
            self.dtype,
            kind=self.kind,
            unvectorized=self.unvectorized * share,
        )
        return busy_s + (_host_s(rates) if self.launched else 0.0)


def _host_s(rates: Rates) -> float:
    """Seconds of a launch where nothing hides it: on a CPU."""
    return rates.device.kernel_launch_s if rates.gpu is None else 0.0


class Computing(NamedTuple):
    """How the kernels of a segment compute."""

    kernels: Kernels
    causal: bool = False
    """Whether attention's kernel skips later tokens."""
    fp8: Fp8Recipe | None = None
    """How products with a weight are computed in 8 bits; None = in the dtype of their inputs."""
    attention: AttentionKernel | None = None
    """The kernel of fused attention; None = the one that torch takes."""
    accumulates: bool = False
    """Whether products for weight gradients add to fp32."""
    cast_before: frozenset[int] = frozenset()
    """Products whose input another one has cast."""
    after_chains: frozenset[int] = frozenset()
    """Products of experts that read the result of the operators between two such products."""


def operator_s(op: Operator, how: Computing, division: Division, rates: Rates) -> float:
    """Device seconds of one operator; on a CPU with its launch, which nothing hides there."""
    if how.kernels.moved_bytes.get(op.index, 0.0) == 0 and op.flops == 0:
        return 0.0  # a view, memory reserved, or a part of another kernel
    if op.flops == 0:
        return Moves.of(op, how.kernels).seconds(division.share(op), rates)
    compute_s = _attention_s if "attention" in op.name else _grouped_s if op.name in GROUPED else _product_s
    return compute_s(op, how, division, rates) + _host_s(rates)


def _attention_s(op: Operator, how: Computing, division: Division, rates: Rates) -> float:
    kernel, causal = ("masked", False) if reads_mask(op) else (how.attention, how.causal)
    share, backward = division.share(op), op.phase == "backward"
    flops = op.flops * share * (0.5 if causal else 1.0)
    sequence, head_dim = op.inputs[0].shape[-2:]
    in_8_bits = how.fp8 is not None and how.fp8.attention
    named = "fp8" if in_8_bits else _named(op)
    busy_s = rates.attention_s(flops, sequence, head_dim, named, backward=backward, kernel=kernel, causal=causal)
    cast = op.inputs[:1] if backward else op.inputs[:3]  # the gradient, or queries, keys and values
    cast_bytes = CAST_BYTES * share * sum(spec.numel for spec in cast) if named == "fp8" else 0.0
    moved = how.kernels.moved_bytes.get(op.index, 0.0)
    return max(busy_s, moved * share / rates.bytes_per_s) + cast_bytes / rates.bytes_per_s


def _grouped_s(op: Operator, how: Computing, division: Division, rates: Rates) -> float:
    """A product for each expert."""
    shape, moved = _cut(op, how, division)
    kernel, fp8, added = how.kernels.grouped, how.fp8, _added(op, how)
    if fp8 is None or not fp8.experts:
        busy_s = rates.grouped_s(*shape, _named(op), kernel=kernel, **added)
        return max(busy_s, moved / rates.bytes_per_s)
    busy_s = rates.grouped_s(*shape, "fp8", kernel="fused" if fp8.fused_experts else kernel, **added)
    busy_s *= _fp32_sums(op, rates)
    chained = fp8.fused_experts and op.index in how.after_chains
    cast_bytes = 0.0 if chained else _cast_bytes(op, shape, fp8)
    return max(busy_s, moved / 2 / rates.bytes_per_s) + cast_bytes / rates.bytes_per_s


def _product_s(op: Operator, how: Computing, division: Division, rates: Rates) -> float:
    shape, moved = _cut(op, how, division)
    fp8, added = how.fp8, _added(op, how)
    if fp8 is None or op.name in BATCHED:
        return max(rates.matmul_s(*shape, _named(op), **added), moved / rates.bytes_per_s)
    busy_s = max(rates.matmul_s(*shape, "fp8", **added) * _fp32_sums(op, rates), moved / 2 / rates.bytes_per_s)
    own = 1.0 / division.tensor if fp8.casts_own_part and division.gathers_input(op) else 1.0
    cast = _cast_bytes(op, shape, fp8, of_input=0.0 if op.index in how.cast_before else own)
    return busy_s + cast / rates.bytes_per_s


def _cut(op: Operator, how: Computing, division: Division) -> tuple[tuple[float, float, float, float], float]:
    """(batch, m, n, k) of the products that a rank computes, and the bytes that they move."""
    shape = division.product(op)
    if division.share(op) < 1 or division.expert > 1:
        return shape, product_bytes(shape, op.inputs[0].dtype)
    return shape, how.kernels.moved_bytes.get(op.index, 0.0)


def _added(op: Operator, how: Computing) -> dict[str, Any]:
    """What a product's time depends on besides its shape and precision."""
    return {"accumulates": how.accumulates and is_weight_gradient(op), "phase": product_phase(op)}


def _named(op: Operator) -> str:
    """The precision in which an operator computes."""
    return PRECISION_OF.get(op.inputs[0].dtype, "fp32")


def _fp32_sums(op: Operator, rates: Rates) -> float:
    return rates.gpu.fp32_sums if rates.gpu is not None and op.phase == "backward" else 1.0


def _cast_bytes(
    op: Operator, shape: tuple[float, float, float, float], fp8: Fp8Recipe, *, of_input: float = 1.0
) -> float:
    """Bytes moved to cast the operands of a product of (batch, m, n, k); of the layer's input, the part ``of_input``."""
    batch, m, n, k = shape
    if is_weight_gradient(op):
        first, second = fp8.weight_gradient_cast_bytes
        second *= of_input
    elif op.phase == "backward":
        first, second = fp8.input_gradient_cast_bytes
    else:
        first, second = fp8.forward_cast_bytes
        first *= of_input
    return batch * (first * m * k + second * k * n)


def inputs_cast_before(segment: Segment) -> frozenset[int]:
    """Products of a pass whose layer's input is that of an earlier product: forward ones, and those that make gradients of weights."""
    owner, found = owners(segment), set[int]()
    seen = set[tuple[str, frozenset[int]]]()
    for op in segment.operators:
        if op.flops == 0 or op.name in (*GROUPED, *BATCHED) or not (op.parameters or is_weight_gradient(op)):
            continue
        if op.phase == "backward" and op.parameters:
            continue  # gradients of inputs: each product's own
        read = {owner[i] for i in op.depends_on if not segment.operators[i].parameters}
        key = op.phase, frozenset(i for i in read if segment.operators[i].phase == "forward")
        found.update({op.index} if key in seen else ())
        seen.add(key)
    return frozenset(found)


def _is_exponential(op: Operator) -> bool:
    name = op.name.removeprefix("aten.")
    return any(part in name for part in EXPONENTIAL) and "expand" not in name


def _dtype(op: Operator) -> str:
    """The dtype of its largest tensor: a cast or a sum works at the pace of what it reads."""
    return max((*op.inputs, *op.outputs), key=lambda spec: spec.numel).dtype
