"""Time and memory of segments that the degrees divide, on one kind of device, whatever groups they communicate in.

Clusters of the same devices, and engines with the same kernels, share these prices: a search prices kernels once, also for its questions
about fewer devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

from ahp.cached_method import cached_method
from ahp.cluster.model import Device, Measurements, NodeGroup
from ahp.engines.fp8 import Fp8Recipe
from ahp.forecast.activations import ActivationLiveness, SegmentMemory
from ahp.forecast.axes import Axes
from ahp.forecast.compute import Launched, SegmentTimes, is_causal
from ahp.forecast.context import joined_s
from ahp.forecast.dispatch import copied_s
from ahp.forecast.division import GROUPED, Division, expert_parameters
from ahp.forecast.efficiency import Rates
from ahp.forecast.gpu import GroupedKernel
from ahp.forecast.graphed import graphed
from ahp.forecast.kernel_options import KernelOptions
from ahp.forecast.kernels import Kernels, kernels
from ahp.forecast.operator_times import Computing
from ahp.forecast.selective import last_read
from ahp.forecast.split import KeysWay, Role, TensorSplit, is_weight_product, split, way_of_keys
from ahp.graph.identity import Same
from ahp.graph.operators import ModelGraph, Operator, Segment


@dataclass(frozen=True)
class _Run:
    """The part of a segment's price that no division changes."""

    segment: Segment
    split: TensorSplit
    kernels: Kernels
    how: KernelOptions
    """Its ``context`` does not matter."""
    fp8: Fp8Recipe | None
    """How products with a weight are computed in 8 bits; None = they are not."""
    causal: bool
    """Whether attention's kernel skips later tokens, see ``is_causal``."""

    @cached_property
    def launched(self) -> Launched:
        how = self.how
        return Launched(
            self.segment,
            Computing(self.kernels, self.causal, self.fp8, how.attention, how.accumulates),
            attention_again=how.attention_again,
            fused_permutation=how.experts.fused_permutation,
            graphed=graphed(self.segment, how.graphed),
        )

    @cached_property
    def held(self) -> ActivationLiveness:
        again, keeps = self.how.attention_again, self.fp8.keeps if self.fp8 else None
        return ActivationLiveness(self.segment, self.kernels, self.split, in_8_bits=keeps, attention_again=again)

    @cached_property
    def num_unread(self) -> int:
        """How many sums over tensor ranks come after the last result that the backward pass reads."""
        last, grouped = (
            last_read(self.segment),
            {op.index for op in self.segment.phase("forward") if op.name in GROUPED},
        )
        if (
            self.split.tokens_summed and not self.reads_results
        ):  # experts' results are summed when a token's are added up
            return sum(index > last or index in grouped for index in self.split.row)
        return sum(index > last for index in self.split.row)

    @cached_property
    def reads_results(self) -> bool:
        """Whether the backward pass reads what a block computes from its experts' results, or after them."""
        forward = {op.index: op for op in self.segment.phase("forward")}
        last = max((op.index for op in forward.values() if op.name in GROUPED), default=None)
        if last is None:
            return False
        read = {i for op in self.segment.phase("backward") for i in op.depends_on if i in forward and i > last}
        return any(forward[i].module != forward[last].module for i in read)

    @cached_property
    def stacked(self) -> frozenset[str]:
        """Weights of experts."""
        return expert_parameters(self.segment)


class Held(NamedTuple):
    """Weights that a rank holds, before sharding over data ranks, in elements."""

    tensors: tuple[int, ...]
    """Each weight, in the order of the forward pass."""
    parameters: int
    experts: int
    """The part of ``parameters`` in experts, which fewer data ranks hold in common."""
    shapes: int
    """One weight of each shape: ``parameters`` with one expert instead of all."""


@dataclass(frozen=True, eq=False)
class Divided:
    """The part of a segment's price that the degrees decide, wherever groups lie and however context ranks see each other's tokens."""

    division: Division
    times: SegmentTimes
    memory: SegmentMemory
    weights: Held
    attention: tuple[Operator, ...]
    """Fused attention of the forward pass."""
    grouped: Operator | None
    """The first product with stacked weights of experts."""
    num_unread: int
    """How many of the last sums over tensor ranks nothing in the backward pass reads."""
    reads_results: bool
    """Whether the backward pass reads what comes after the results of experts."""


class SegmentPricer:
    """Prices the segments of one model on one kind of device; keeps what it has priced."""

    def __init__(self, graph: ModelGraph, rates: Rates) -> None:
        self._graph, self.rates = graph, rates
        self._causal = is_causal(graph)
        self._runs: dict[tuple[int, Role, int, int, KeysWay], _Run] = {}
        self._divided: dict[tuple[object, ...], Divided] = {}
        numbers: dict[KernelOptions, int] = {}
        self._number = cache(lambda how: numbers.setdefault(how._replace(context="ring"), len(numbers)))
        """The number of some kernels, the same however context ranks see each other's tokens."""

    @classmethod
    def of(cls, graph: ModelGraph, nodes: NodeGroup) -> SegmentPricer:
        """The shared pricer for this graph object and equal devices."""
        measured = nodes.measured.model_dump_json() if nodes.measured else None
        # The number of workers on a node matters only to measurements.
        return _segment_pricer(
            Same(graph), nodes.device.model_dump_json(), measured, nodes.devices_per_node if measured else 1
        )

    @cached_method
    def at(self, size: int) -> ModelGraph:
        """The model's graph for a micro-batch of so many sequences."""
        return self._graph if size == self._graph.micro_batch_size else self._graph.at(size)

    @cached_method
    def forward_flops(self, micro_batch_size: int) -> int:
        """FLOPs of the whole model's forward pass."""
        return self.at(micro_batch_size).flops("forward")

    @cached_method
    def beside_products_s(
        self, micro_batch_size: int, tensor: int, sequence_parallel: bool, context: int, how: KernelOptions
    ) -> tuple[float, ...]:
        """Device seconds of both passes without products, with what context ranks join, for each kind of block: a part of its unit's time that is quick
        to find."""
        graph, found = self.at(micro_batch_size), []
        for number, block in enumerate(graph.blocks):
            run = self._run(graph, block, "block", number, how, tensor)
            division = Division(run.split, tensor, sequence_parallel, context)
            seconds = run.launched.beside_products_s(division, self.rates)
            if context > 1 and how.context != "all-to-all":
                seconds += sum(joined_s(_attention(block), division, how.sharing, self.rates))
            found.append(seconds)
        return tuple(found)

    def _run(
        self, graph: ModelGraph, segment: Segment, role: Role, number: int, how: KernelOptions, tensor: int
    ) -> _Run:
        way: KeysWay = "parts" if role != "block" else way_of_keys(segment, tensor, how.tensor.few_keys)
        alike = graph.micro_batch_size, role, number, self._number(how), way
        if alike not in self._runs:
            parts = split(
                segment,
                role,
                experts=how.experts,
                way_of_keys=way,
                gathers_normed=how.tensor.gathers_normed,
            )
            own, fp8 = how.kernels, how.fp8
            if role != "block":
                own, fp8 = own._replace(fusion=own.fusion_at_the_ends or own.fusion), None
            biases_apart = how.experts.launched_one_by_one and (fp8 is None or not fp8.fused_experts)
            grouped: GroupedKernel = "each" if how.experts.launched_one_by_one else "torch"
            run = kernels(segment, own, biases_apart=biases_apart, grouped=grouped)
            self._runs[alike] = _Run(segment, parts, run, how, fp8, self._causal)
        return self._runs[alike]

    def divided(
        self, graph: ModelGraph, segment: Segment, role: Role, number: int, axes: Axes, how: KernelOptions
    ) -> Divided:
        """A segment of one micro-batch divided by the degrees of the axes; ``number``: of its kind of block."""
        run = self._run(graph, segment, role, number, how, axes.tensor.size)
        degree, context, experts = axes.tensor.size, axes.context.size, axes.expert.size if run.stacked else 1
        sequence_parallel = axes.sequence_parallel and degree > 1
        key = graph.micro_batch_size, role, number, self._number(how), degree, sequence_parallel, context, experts
        if key in self._divided:
            return self._divided[key]
        parts, stacked = run.split, run.stacked
        division = Division(parts, degree, sequence_parallel, context, experts)
        held = {p.name: _held(p.numel, parts, p.name, degree) for p in segment.parameters}
        held = {name: -(-count // experts) if name in stacked else count for name, count in held.items()}
        one = {p.name: held[p.name] // max(1, p.shape[0] // experts) for p in segment.parameters if p.name in stacked}
        times = run.launched.times(division, self.rates)
        if stacked:
            times = times.launching(*how.expert_operators)
        forward = list(segment.phase("forward"))
        grouped = next((op for op in forward if op.name in GROUPED), None)
        if grouped is not None and how.experts.one_after_another:
            computed = 1 / context / (degree if how.experts.folded else 1)
            times = times.moving(*copied_s(grouped, computed, experts, self.rates.bytes_per_s))
        if how.one_graph:
            times = times.in_a_graph()
        on = run.held.on(
            division, keeps_gathered=not how.tensor.gathers_inputs_again, loss_copies=how.tensor.loss_copies
        )
        weights = Held(
            tensors=tuple(held.values()),
            parameters=sum(held.values()),
            experts=sum(count for name, count in held.items() if name in one),
            shapes=sum((held | one).values()),
        )
        on = _with_casts(on, segment, division, run.fp8)
        unread = run.num_unread, run.reads_results
        self._divided[key] = Divided(division, times, on, weights, _attention(segment), grouped, *unread)
        return self._divided[key]


@lru_cache(maxsize=16)
def _segment_pricer(graph: Same, device: str, measured: str | None, workers: int) -> SegmentPricer:
    known = None if measured is None else Measurements.model_validate_json(measured)
    return SegmentPricer(graph.value, Rates(Device.model_validate_json(device), known, workers))


def _with_casts(memory: SegmentMemory, segment: Segment, division: Division, fp8: Fp8Recipe | None) -> SegmentMemory:
    """``memory`` plus what the casts of the largest operand of a product in 8 bits need besides it."""
    if fp8 is None or not fp8.temporary_bytes:
        return memory
    shapes = [division.product(op) for op in segment.operators if is_weight_product(op) and op.name not in GROUPED]
    largest = max((max(m * k, k * n) for _, m, n, k in shapes), default=0.0)
    more = round(largest * fp8.temporary_bytes)
    return replace(memory, forward_extra=memory.forward_extra + more, backward_extra=memory.backward_extra + more)


def _attention(segment: Segment) -> tuple[Operator, ...]:
    """Fused attention of the forward pass."""
    return tuple(op for op in segment.phase("forward") if "attention" in op.name)


def _held(numel: int, parts: TensorSplit, name: str, degree: int) -> int:
    return -(-numel // degree) if name in parts.parameters else numel
