"""How long the operators of a segment take on one device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import cache

from ahp.forecast.constants import constants
from ahp.forecast.division import BATCHED, Division, is_weight_gradient
from ahp.forecast.efficiency import Rates
from ahp.forecast.expert_operators import ExpertOperators
from ahp.forecast.operator_times import Computing, Moves, inputs_cast_before, operator_s
from ahp.forecast.selective import last_read, second_products
from ahp.graph.operators import ModelGraph, Operator, Segment

VIEW_LAUNCHES = constants.value("view_launches")
"""Host time of an operator that only makes a view, over that of one that launches a kernel."""

BACKWARD_LAUNCHES = constants.value("backward_launches")
"""Host time of an operator of the backward pass, over that of one of the forward pass."""


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


class Launched:
    """The kernels of a segment in their order, with the figures that no division changes."""

    def __init__(
        self,
        segment: Segment,
        how: Computing,
        *,
        attention_again: bool = False,
        fused_permutation: bool = False,
        graphed: frozenset[int] = frozenset(),
    ) -> None:
        """``how``: without what is known from the segment. ``attention_again``: recompute of every second product repeats fused attention too.
        ``fused_permutation``: see ``ExpertTraits``. ``graphed``: operators that one CUDA graph launches in each pass."""
        kernels, fp8 = how.kernels, how.fp8
        self._experts = ExpertOperators.of(segment, kernels)
        cast_before = inputs_cast_before(segment) if fp8 is not None and fp8.casts_once else frozenset[int]()
        self._how = how._replace(cast_before=cast_before, after_chains=self._experts.after_chains)
        self._fuses_experts = fp8 is not None and fp8.fused_experts
        core, last = core_attention(segment), last_read(segment)
        second = second_products(segment, attention_too=attention_again)
        self._runs: list[tuple[Operator, Moves | None, tuple[str, ...]]] = []
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
                self._runs.append((op, None if op.flops else Moves.of(op, kernels), sums))
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
                taken = operator_s(op, self._how, division, rates)
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
                seconds += operator_s(op, self._how, division, rates)
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
