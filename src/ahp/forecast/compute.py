"""How long the operators of a segment take on one device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

from ahp.engines.fp8 import Fp8Recipe
from ahp.forecast.constants import constants
from ahp.forecast.division import BATCHED, GROUPED, Division, is_weight_gradient, product_bytes, product_phase
from ahp.forecast.efficiency import Rates, kind_of
from ahp.forecast.expert_operators import ExpertOperators
from ahp.forecast.gpu import AttentionKernel, ElementWiseKind
from ahp.forecast.kernels import Kernels, owners
from ahp.forecast.selective import last_read, second_products
from ahp.forecast.tables import PRECISION_OF
from ahp.graph.operators import ModelGraph, Operator, Segment

EXPONENTIAL = ("softmax", "silu", "gelu", "sigmoid", "tanh", "exp", "logsumexp", "erf")
"""Element-wise operators that take an exponential (or as much arithmetic) of every element, by a part of their name."""


VIEW_LAUNCHES = constants.value("view_launches")
"""Host time of an operator that only makes a view, over that of one that launches a kernel."""

BACKWARD_LAUNCHES = constants.value("backward_launches")
"""Host time of an operator of the backward pass, over that of one of the forward pass."""


CAST_BYTES = 4
"""Bytes moved per 16-bit element that a fused kernel casts to 8 bits: it reads the element, and writes it in both memory orders."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a pass over a segment, for the device and for the host that launches it."""

    device_s: float = 0.0
    launches: float = 0.0
    """Operators that the host launches; a view counts ``VIEW_LAUNCHES``. On a CPU, where host and device are one, they are in ``device_s``."""

    def __add__(self, other: Work) -> Work:
        return Work(self.device_s + other.device_s, self.launches + other.launches)


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """Work of one segment on one micro-batch."""

    forward: Work = Work()
    read: Work = Work()
    """The part of ``forward`` up to the last result that the backward pass reads: the residual sum at the end and the product before it
    come later."""
    input_gradient: Work = Work()
    """The backward pass without the products that make weight gradients."""
    weight_gradient: Work = Work()
    core_attention: Work = Work()
    """The forward pass's scores, softmax, dropout and their product with the values, where attention is not fused."""
    element_wise: Work = Work()
    """The part of ``read`` that is neither weight products nor attention."""
    products: Work = Work()
    """The forward pass's weight products. The backward products that make the gradients of inputs take as long."""
    second_products: Work = Work()
    """Every second one of ``products``, and fused attention where recompute repeats it with these."""
    attention: Work = Work()
    """The forward pass's fused attention."""
    attention_backward: Work = Work()

    def launching(self, forward: float, backward: float) -> SegmentTimes:
        """The same times with further operators for the host to launch, in the forward and in the backward pass."""
        more = Work(launches=forward)
        return self._plus(forward=more, read=more, input_gradient=Work(launches=backward))

    def moving(self, forward_s: float, backward_s: float) -> SegmentTimes:
        """The same times with further seconds of the device, in the forward and in the backward pass."""
        more = Work(forward_s)
        return self._plus(forward=more, read=more, element_wise=more, input_gradient=Work(backward_s))

    def _plus(self, **more: Work) -> SegmentTimes:
        return replace(self, **{name: getattr(self, name) + work for name, work in more.items()})

    def in_a_graph(self) -> SegmentTimes:
        """The same times where one graph launches everything."""
        return SegmentTimes(**{field.name: Work(getattr(self, field.name).device_s) for field in fields(self)})

    @property
    def forward_s(self) -> float:
        return self.forward.device_s

    @property
    def backward_s(self) -> float:
        return self.input_gradient.device_s + self.weight_gradient.device_s


def is_causal(graph: ModelGraph) -> bool:
    """Whether attention's kernel can skip later tokens: a model whose loss shifts the labels predicts the next token.

    torch counts the FLOPs of fused attention over all S x S scores; a causal kernel computes half of the scores, a kernel that reads
    a mask (``reads_mask``) does all.
    """
    return any(op.name == "aten.constant_pad_nd" and op.module == "loss" for op in graph.head.operators)


BEFORE_MASK = {"forward": 3, "backward": 6}
"""Tensors that fused attention reads before its mask: queries, keys and values; and the gradient, these, the output and the sums of its rows."""


def reads_mask(op: Operator) -> bool:
    """Whether fused attention gets a mask for each query, of documents or of a sliding window; where documents start is one row for all."""
    if "attention" not in op.name or len(op.inputs) <= (before := BEFORE_MASK[op.phase]):
        return False
    return len(op.inputs[before].shape) > 1 and op.inputs[before].shape[-2] > 1


class Launched:
    """The kernels of a segment in their order, with the figures that no division changes."""

    def __init__(
        self,
        segment: Segment,
        kernels: Kernels,
        *,
        causal: bool,
        fp8: Fp8Recipe | None = None,
        kernel: AttentionKernel | None = None,
        accumulates: bool = False,
        attention_again: bool = False,
        fused_permutation: bool = False,
        graphed: frozenset[int] = frozenset(),
    ) -> None:
        """``fp8``: how products with a weight are computed in 8 bits, None = in the dtype of their inputs. ``accumulates``: products for
        weight gradients add to fp32. ``attention_again``: recompute of every second product repeats fused attention too.
        ``fused_permutation``: see ``ExpertTraits``. ``graphed``: operators that one CUDA graph launches in each pass."""
        self._experts = ExpertOperators.of(segment, kernels)
        cast_before = inputs_cast_before(segment) if fp8 is not None and fp8.casts_once else frozenset[int]()
        self._operator_s = partial(
            operator_s,
            kernels=kernels,
            causal=causal,
            fp8=fp8,
            cast_before=cast_before,
            kernel=kernel,
            accumulates=accumulates,
        )
        self._fuses_experts = fp8 is not None and fp8.fused_experts
        core, last = core_attention(segment), last_read(segment)
        second = second_products(segment, attention_too=attention_again)
        self._runs: list[tuple[Operator, _Moves | None, tuple[str, ...]]] = []
        """(operator that takes time, what it moves if it does nothing else, the sums it belongs to)."""
        self._launches: dict[str, float] = defaultdict(float)
        for op in segment.operators:
            sums = _sums_with(op, op.index in core, op.index in second, op.index <= last)
            mirrored = fused_permutation and op.index in self._experts.permuting
            if mirrored and op.phase == "backward":
                continue
            launches = 1.0 if op.index in kernels.launched else VIEW_LAUNCHES if is_view(op) else 0.0
            launches = 0.0 if op.index in graphed else launches
            launches *= BACKWARD_LAUNCHES if op.phase == "backward" else 1.0
            for name in sums:
                self._launches[name] += launches
            if mirrored:
                sums = (*sums, "input_gradient")  # backward moves as much, in two kernels that are not counted
            moved = kernels.moved_bytes.get(op.index, 0.0)
            if (moved or op.flops) and not (self._fuses_experts and op.index in self._experts.between):
                self._runs.append((op, None if op.flops else _Moves.of(op, kernels), sums))
        for name in ("forward", "read", "input_gradient") if graphed else ():
            self._launches[name] += BACKWARD_LAUNCHES if name == "input_gradient" else 1.0  # the graph itself
        self._moving_s = cache(self._each_moving_s)  # many divisions have one share

    def times(self, division: Division, rates: Rates) -> SegmentTimes:
        """Work of one rank of the groups that ``division`` describes.

        Every operator takes max(FLOPs / reached FLOP/s, bytes / reached bytes/s).
        """
        seconds: dict[str, float] = defaultdict(float)
        for at, (op, moves, sums) in enumerate(self._runs):
            if moves is not None:
                taken = self._moving_s(division.share(op), rates)[at]
            else:
                chain = op.index in self._experts.after_chains
                taken = self._operator_s(op, division=division, rates=rates, reads_chain=chain)
            for name in sums:
                seconds[name] += taken
        if self._fuses_experts:
            stash_s = 2 * self._experts.stashed_bytes * division.row_share / rates.bytes_per_s
            for name in ("forward", "read", "input_gradient"):
                seconds[name] += stash_s
        return SegmentTimes(**{name: Work(seconds[name], self._launches[name]) for name in SUMS})

    def beside_products_s(self, division: Division, rates: Rates) -> float:
        """Seconds of both passes in ``times`` without the products: cheap to compute."""
        seconds = 0.0
        for at, (op, moves, _) in enumerate(self._runs):
            if moves is not None:
                seconds += self._moving_s(division.share(op), rates)[at]
            elif "attention" in op.name:
                seconds += self._operator_s(op, division=division, rates=rates)
        return seconds

    def _each_moving_s(self, share: float, rates: Rates) -> list[float]:
        """Seconds of each operator that only moves data, on a rank that does ``share`` of it."""
        return [0.0 if moves is None else moves.seconds(share, rates) for _, moves, _ in self._runs]


SUMS = tuple(field.name for field in fields(SegmentTimes))


def _sums_with(op: Operator, in_core: bool, second: bool, read: bool) -> tuple[str, ...]:
    """The fields of ``SegmentTimes`` that an operator counts in."""
    fused = "attention" in op.name
    if op.phase == "backward":
        product = "weight_gradient" if is_weight_gradient(op) else "input_gradient"
        return (product, "attention_backward") if fused else (product,)
    passes = ("forward", "read") if read else ("forward",)
    if in_core:
        return (*passes, "core_attention")
    if op.flops == 0:
        return (*passes, "element_wise") if read else passes
    again = ("second_products",) if second else ()
    return (*passes, "attention" if fused else "products", *again)


@dataclass(frozen=True, slots=True)
class _Moves:
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
    def of(cls, op: Operator, kernels: Kernels) -> _Moves:
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


def operator_s(
    op: Operator,
    kernels: Kernels,
    division: Division,
    rates: Rates,
    *,
    causal: bool = False,
    fp8: Fp8Recipe | None = None,
    cast_before: frozenset[int] = frozenset(),
    kernel: AttentionKernel | None = None,
    accumulates: bool = False,
    reads_chain: bool = False,
) -> float:
    """Device seconds of one operator; on a CPU with its launch, which nothing hides there.

    ``cast_before``: products whose input another one has cast. ``reads_chain``: the operator is a product of experts that reads the result of
    the operators between two such products.
    """
    moved = kernels.moved_bytes.get(op.index, 0.0)
    if moved == 0 and op.flops == 0:
        return 0.0  # a view, memory reserved, or a part of another kernel
    share, host_s = division.share(op), _host_s(rates)
    if op.flops == 0:
        return _Moves.of(op, kernels).seconds(share, rates)
    dtype = op.inputs[0].dtype
    named = PRECISION_OF.get(dtype, "fp32")
    if "attention" in op.name:
        kernel, causal = ("masked", False) if reads_mask(op) else (kernel, causal)
        flops = op.flops * share * (0.5 if causal else 1.0)
        sequence, head_dim = op.inputs[0].shape[-2:]
        if fp8 is not None and fp8.attention:
            named = "fp8"
        busy_s = rates.attention_s(
            flops, sequence, head_dim, named, backward=op.phase == "backward", kernel=kernel, causal=causal
        )
        cast = op.inputs[:1] if op.phase == "backward" else op.inputs[:3]  # the gradient, or queries, keys and values
        cast_bytes = CAST_BYTES * share * sum(spec.numel for spec in cast) if named == "fp8" else 0.0
        return max(busy_s, moved * share / rates.bytes_per_s) + cast_bytes / rates.bytes_per_s + host_s
    shape = division.product(op)
    if share < 1 or division.expert > 1:
        moved = product_bytes(shape, dtype)
    added: dict[str, Any] = {"accumulates": accumulates and is_weight_gradient(op), "phase": product_phase(op)}
    if op.name in GROUPED:
        if fp8 is None or not fp8.experts:
            busy_s = rates.grouped_s(*shape, named, kernel=kernels.grouped, **added)
            return max(busy_s, moved / rates.bytes_per_s) + host_s
        busy_s = rates.grouped_s(*shape, "fp8", kernel="fused" if fp8.fused_experts else kernels.grouped, **added)
        busy_s *= _fp32_sums(op, rates)
        cast_bytes = 0.0 if fp8.fused_experts and reads_chain else _cast_bytes(op, shape, fp8)
        return max(busy_s, moved / 2 / rates.bytes_per_s) + cast_bytes / rates.bytes_per_s + host_s
    if fp8 is None or op.name in BATCHED:
        return max(rates.matmul_s(*shape, named, **added), moved / rates.bytes_per_s) + host_s
    busy_s = max(rates.matmul_s(*shape, "fp8", **added) * _fp32_sums(op, rates), moved / 2 / rates.bytes_per_s)
    own = 1.0 / division.tensor if fp8.casts_own_part and division.gathers_input(op) else 1.0
    cast = _cast_bytes(op, shape, fp8, of_input=0.0 if op.index in cast_before else own)
    return busy_s + cast / rates.bytes_per_s + host_s


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


def core_attention(segment: Segment) -> frozenset[int]:
    """Forward operators of unfused attention: the two batched products, and all that lies between them."""
    forward = list(segment.phase("forward"))
    batched = {op.index for op in forward if op.name in BATCHED}
    after: set[int] = set()
    for op in forward:
        if op.index in batched or any(i in after for i in op.depends_on):
            after.add(op.index)
    before: set[int] = set()
    for op in reversed(forward):
        if op.index in batched or op.index in before:
            before.add(op.index)
            before.update(op.depends_on)
    return frozenset(after & before)


def is_view(op: Operator) -> bool:
    """An operator that runs nothing on the device."""
    return op.flops == 0 and op.bytes_read + op.bytes_written == 0


def _is_exponential(op: Operator) -> bool:
    name = op.name.removeprefix("aten.")
    return any(part in name for part in EXPONENTIAL) and "expand" not in name


def _dtype(op: Operator) -> str:
    """The dtype of its largest tensor: a cast or a sum works at the pace of what it reads."""
    return max((*op.inputs, *op.outputs), key=lambda spec: spec.numel).dtype
