"""What one segment costs on one rank: time, memory, parameters and tensor-parallel traffic of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from ahp.cluster.model import NodeGroup
from ahp.engines.fp8 import Fp8Recipe, Kept
from ahp.engines.traits import ContextWay, Traits
from ahp.forecast.activations import ActivationLiveness, SegmentMemory
from ahp.forecast.axes import Axes
from ahp.forecast.chunked_head import chunked_head
from ahp.forecast.communication import Network
from ahp.forecast.compute import Launched, SegmentTimes, is_causal
from ahp.forecast.context import SharedTokens, shared_tokens_s
from ahp.forecast.dispatch import Routed, pass_waits_s
from ahp.forecast.division import GROUPED, Division, attention_heads, expert_parameters
from ahp.forecast.efficiency import Rates
from ahp.forecast.group import Group
from ahp.forecast.kernel_options import KernelOptions
from ahp.forecast.kernels import Kernels, kernels
from ahp.forecast.selective import last_read
from ahp.forecast.split import KeysWay, Role, TensorSplit, is_weight_product, split, way_of_keys
from ahp.forecast.tensor_collectives import TensorCollectives
from ahp.forecast.unit import Unit
from ahp.graph.operators import ModelGraph, Operator, Segment
from ahp.schedule.chunks import chunks


@dataclass(frozen=True, eq=False)
class Units:
    """Every kind of segment of a model, for one micro-batch size and one set of axes. The pricer makes each once: two are
    equal where they are the same."""

    embedding: Unit
    blocks: tuple[Unit, ...]
    layers: tuple[int, ...]
    head: Unit
    tied_parameters: int
    """Elements the rank holds of weights that the embedding and the head share."""
    hidden_bytes: int
    """What a rank holds of the hidden states between two blocks, and sends to the next stage."""
    forward_flops: int
    """Of the whole model and one micro-batch."""


def least_of(ways: list[Units]) -> Units:
    """Of units that differ in how context ranks see tokens, the least of each figure."""
    if len(ways) == 1:
        return ways[0]
    blocks = tuple(map(_least_unit, zip(*(units.blocks for units in ways), strict=True)))
    return replace(ways[0], blocks=blocks)


def _least_unit(alike: tuple[Unit, ...]) -> Unit:
    return replace(
        alike[0],
        context_forward_s=min(unit.context_forward_s for unit in alike),
        context_again_s=min(unit.context_again_s for unit in alike),
        context_backward_s=min(unit.context_backward_s for unit in alike),
        context_hidden_s=(
            min(unit.context_hidden_s[0] for unit in alike),
            min(unit.context_hidden_s[1] for unit in alike),
        ),
    )


@dataclass(frozen=True)
class _Run:
    """What of a segment no division changes."""

    segment: Segment
    split: TensorSplit
    kernels: Kernels
    in_8_bits: Kept | None
    attention_again: bool
    fused_permutation: bool

    @cached_property
    def launched(self) -> Launched:
        again, fused = self.attention_again, self.fused_permutation
        return Launched(self.segment, self.kernels, attention_again=again, fused_permutation=fused)

    @cached_property
    def held(self) -> ActivationLiveness:
        again = self.attention_again
        return ActivationLiveness(
            self.segment, self.kernels, self.split, in_8_bits=self.in_8_bits, attention_again=again
        )

    @cached_property
    def num_unread(self) -> int:
        """Sums over tensor ranks that come after the last result that the backward pass reads."""
        last = last_read(self.segment)
        return sum(index > last for index in self.split.row)

    @cached_property
    def stacked(self) -> frozenset[str]:
        """Weights of experts."""
        return expert_parameters(self.segment)


class _Held(NamedTuple):
    """Weights that a rank holds, in elements: ``Unit`` says which."""

    tensors: tuple[int, ...]
    parameters: int
    experts: int
    shapes: int


@dataclass(frozen=True)
class _Divided:
    """What of a segment its degrees decide, wherever the groups lie on nodes and however context ranks see tokens."""

    division: Division
    times: SegmentTimes
    memory: SegmentMemory
    weights: _Held
    attention: tuple[Operator, ...]
    """Fused attention of the forward pass."""
    grouped: Operator | None
    """The first product with stacked weights of experts."""
    num_unread: int
    """Of the sums over tensor ranks, those at the end that nothing in the backward pass reads."""
    units: dict[tuple[object, ...], Unit] = field(default_factory=dict)
    """By the groups that it communicates in."""
    shared_tokens: dict[tuple[Group, ContextWay], SharedTokens] = field(default_factory=dict)
    """By the context group, and how its ranks see tokens."""


class UnitPricer:
    """Prices the segments of one model on one kind of node; keeps what it has priced."""

    def __init__(self, graph: ModelGraph, nodes: NodeGroup, network: Network, precision: str) -> None:
        self._graph, self._network = graph, network
        self.rates = Rates(nodes.device, nodes.measured, nodes.devices_per_node)
        self._tensor = TensorCollectives(self.rates, network)
        self._generation = self.rates.gpu.generation if self.rates.gpu else None
        self._in_fp8 = precision == "fp8"
        self._causal = is_causal(graph)
        self._has_experts = any(map(expert_parameters, graph.blocks))
        self._heads = [attention_heads(block) for block in graph.blocks]
        self._graphs = {graph.micro_batch_size: graph}
        self._forward_flops = cache(lambda micro_batch_size: self._at(micro_batch_size).flops("forward"))
        self._units: dict[tuple[int, Axes, KernelOptions], Units] = {}
        self._least: dict[tuple[int, Axes, Traits], Units] = {}
        self._kernels: dict[tuple[int, Role, int, int, KeysWay], _Run] = {}
        self._divided: dict[tuple[object, ...], _Divided] = {}
        numbers: dict[KernelOptions, int] = {}
        self._number = cache(lambda how: numbers.setdefault(how._replace(context="ring"), len(numbers)))
        """Of kernels, the same however context ranks see tokens."""

    def units(self, micro_batch_size: int, axes: Axes, traits: Traits) -> Units:
        """The units for a micro-batch size and the groups that divide it; where the engine has several ways to share sequences,
        no way takes less than they say."""
        key = micro_batch_size, axes, traits
        if key not in self._least:
            ways = self.ways(axes, traits)
            self._least[key] = least_of([self._units_by(way, micro_batch_size, axes, traits) for way in ways])
        return self._least[key]

    def ways(self, axes: Axes, traits: Traits) -> list[ContextWay]:
        """How the context ranks may see each other's tokens."""
        if axes.context.size == 1 or len(traits.context.ways) == 1:
            return [traits.context.ways[0]]
        return [way for way in traits.context.ways if self._can(way, axes)]

    def _shared_tokens(self, of: _Divided, axes: Axes, how: KernelOptions) -> SharedTokens:
        key = axes.context, how.context
        if key not in of.shared_tokens:
            of.shared_tokens[key] = shared_tokens_s(
                of.attention, of.division, axes.context, of.times, how.context, how.context_sums_bytes, self.rates, self._network
            )  # fmt: skip
        return of.shared_tokens[key]

    def _can(self, way: ContextWay, axes: Axes) -> bool:
        """Whether every rank can have as many heads."""
        ranks = axes.context.size * axes.tensor.size
        return way != "all-to-all" or not any(heads % ranks for heads in self._heads)

    def how(self, traits: Traits, way: ContextWay) -> KernelOptions:
        """The kernels of an engine on these devices."""
        return KernelOptions.of(traits, way, self._generation, in_fp8=self._in_fp8, has_experts=self._has_experts)

    def _units_by(self, way: ContextWay, micro_batch_size: int, axes: Axes, traits: Traits) -> Units:
        how = self.how(traits, way)
        key = micro_batch_size, axes, how
        if key not in self._units:
            self._units[key] = self._price(self._at(micro_batch_size), axes, how)
        return self._units[key]

    def _at(self, micro_batch_size: int) -> ModelGraph:
        if micro_batch_size not in self._graphs:
            self._graphs[micro_batch_size] = self._graph.at(micro_batch_size)
        return self._graphs[micro_batch_size]

    def _price(self, graph: ModelGraph, axes: Axes, how: KernelOptions) -> Units:
        embedding = self._unit(graph, graph.embedding, "embedding", 0, axes, how)
        hidden = graph.blocks[0].output if graph.blocks else graph.embedding.output
        hidden_bytes = hidden.bytes if hidden else 0
        cut = axes.context.size * (axes.tensor.size if axes.sequence_parallel else 1)
        return Units(
            embedding=embedding,
            blocks=tuple(self._unit(graph, block, "block", i, axes, how) for i, block in enumerate(graph.blocks)),
            layers=graph.layers,
            head=self._head(graph, axes, how, hidden_bytes // axes.context.size),
            tied_parameters=_tied_parameters(graph) // axes.tensor.size,
            hidden_bytes=hidden_bytes // cut,
            forward_flops=self._forward_flops(graph.micro_batch_size),
        )

    def _head(self, graph: ModelGraph, axes: Axes, how: KernelOptions, hidden_bytes: int) -> Unit:
        if how.loss_chunk_tokens is None:
            return self._unit(graph, graph.head, "head", 0, axes, how)
        count = len(chunks(graph.micro_batch_size, graph.sequence_length // axes.context.size, how.loss_chunk_tokens))
        # A chunk is to the micro-batch as the part of a context-parallel rank is.
        context = replace(axes.context, size=axes.context.size * count)
        one = self._unit(graph, graph.head, "head", 0, axes._replace(context=context), how)
        return chunked_head(
            one,
            count,
            weights=one.parameters + _tied_parameters(graph) // axes.tensor.size,
            weight_bytes=how.weight_bytes,
            hidden_bytes=hidden_bytes,
            rates=self.rates,
        )

    def _unit(
        self, graph: ModelGraph, segment: Segment, role: Role, number: int, axes: Axes, how: KernelOptions,
    ) -> Unit:  # fmt: skip
        of = self._of_degrees(graph, segment, role, number, axes, how)
        fp8 = how.fp8 if role == "block" else None  # engines leave the head in the compute type
        context = axes.context if of.attention or fp8 is not None else None
        expert = (axes.expert, axes.beside_opposite) if of.grouped else None
        groups = axes.tensor, axes.sequence_parallel, context, how.context, expert
        if groups not in of.units:
            of.units[groups] = self._communicating(of, graph.micro_batch_size, segment, axes, how, fp8)
        return of.units[groups]

    def _communicating(
        self,
        of: _Divided,
        micro_batch_size: int,
        segment: Segment,
        axes: Axes,
        how: KernelOptions,
        fp8: Fp8Recipe | None,
    ) -> Unit:
        in_8_bits = fp8 is not None and fp8.gathers_in_8_bits
        parts = of.division.split
        tensor = self._tensor.of_segment(
            parts, axes, of.times, how, fp8=in_8_bits, sequences=micro_batch_size, num_unread=of.num_unread
        )
        if fp8 is not None and fp8.shares_scales:
            tensor = self._tensor.with_scales(tensor, parts, axes, segment)
        shared = self._shared_tokens(of, axes, how)
        return Unit(
            times=of.times,
            memory=of.memory,
            tensor_forward_s=tensor.forward_s,
            tensor_again_s=tensor.again_s,
            tensor_gather_s=tensor.gather_s,
            tensor_backward_s=tensor.backward_s,
            tensor_launches=0 if how.one_graph else tensor.launches,
            context_forward_s=shared.forward_s,
            context_again_s=0.0 if how.context == "ring" else shared.forward_s,
            context_backward_s=shared.backward_s,
            context_hidden_s=(shared.hidden_forward_s, shared.hidden_backward_s),
            expert_s=self._expert_s(of, micro_batch_size, axes, how),
            # The host has waited for the number of tokens of each expert, and only then prepares their products.
            stalled_launches=how.expert_operators[0] if of.weights.experts and not how.one_graph else 0.0,
            **of.weights._asdict(),
        )

    def beside_products_s(
        self, micro_batch_size: int, tensor: int, sequence_parallel: bool, context: int, how: KernelOptions
    ) -> tuple[float, ...]:
        """Of each kind of block, device seconds of both passes but for products: a part of what its unit has, soon known."""
        graph, found = self._at(micro_batch_size), []
        for number, block in enumerate(graph.blocks):
            run = self._run(graph, block, "block", number, how, tensor)
            division = Division(run.split, tensor, sequence_parallel, context)
            found.append(
                run.launched.beside_products_s(
                    division, self.rates, causal=self._causal, fp8=how.fp8, kernel=how.attention
                )
            )
        return tuple(found)

    def _run(
        self, graph: ModelGraph, segment: Segment, role: Role, number: int, how: KernelOptions, tensor: int
    ) -> _Run:
        way: KeysWay = "parts" if role != "block" else way_of_keys(segment, tensor, how.few_keys)
        alike = graph.micro_batch_size, role, number, self._number(how), way
        if alike not in self._kernels:
            experts = {"whole_biased_experts": how.whole_biased_experts, "folded_experts": how.folded_experts}
            parts = split(segment, role, way_of_keys=way, **experts)
            fp8 = how.fp8 if role == "block" else None
            run = kernels(segment, how.fusion, fused_loss=how.fused_loss, grouped=how.grouped)
            self._kernels[alike] = _Run(
                segment, parts, run, fp8.keeps if fp8 else None, how.attention_again, how.fused_permutation
            )
        return self._kernels[alike]

    def _of_degrees(
        self, graph: ModelGraph, segment: Segment, role: Role, number: int, axes: Axes, how: KernelOptions
    ) -> _Divided:
        run = self._run(graph, segment, role, number, how, axes.tensor.size)
        degree, context, experts = axes.tensor.size, axes.context.size, axes.expert.size if run.stacked else 1
        sequence_parallel = axes.sequence_parallel and degree > 1
        key = graph.micro_batch_size, role, number, self._number(how), degree, sequence_parallel, context, experts
        if key in self._divided:
            return self._divided[key]
        fp8 = how.fp8 if role == "block" else None
        parts, stacked = run.split, run.stacked
        division = Division(parts, degree, sequence_parallel, context, experts)
        held = {p.name: _held(p.numel, parts, p.name, degree) for p in segment.parameters}
        held = {name: -(-count // experts) if name in stacked else count for name, count in held.items()}
        one = {p.name: held[p.name] // max(1, p.shape[0] // experts) for p in segment.parameters if p.name in stacked}
        times = run.launched.times(
            division,
            self.rates,
            causal=self._causal,
            fp8=fp8,
            kernel=how.attention,
            accumulates=how.accumulates,
        )
        if stacked:
            times = times.launching(*how.expert_operators)
        if how.one_graph:
            times = times.in_a_graph()
        on = run.held.on(division, keeps_gathered=not how.gathers_again)
        weights = _Held(
            tensors=tuple(held.values()),
            parameters=sum(held.values()),
            experts=sum(count for name, count in held.items() if name in one),
            shapes=sum((held | one).values()),
        )
        forward = list(segment.phase("forward"))
        attention = tuple(op for op in forward if "attention" in op.name)
        grouped = next((op for op in forward if op.name in GROUPED), None)
        on = _with_casts(on, segment, division, fp8)
        self._divided[key] = _Divided(division, times, on, weights, attention, grouped, run.num_unread)
        return self._divided[key]

    def _expert_s(self, of: _Divided, micro_batch_size: int, axes: Axes, how: KernelOptions) -> float:
        """Seconds that a pass waits for every token to reach the ranks of its experts, and for the answers."""
        grouped = of.grouped
        if axes.expert.size == 1 or grouped is None:
            return 0.0
        division, tokens = of.division, micro_batch_size * self._graph.sequence_length
        parts = 1 if how.experts_gather_tokens or not division.sequence_parallel else division.tensor
        routed = Routed.of(grouped, 1 / division.context / parts, tokens)
        once, overlap = how.tokens_once_to_a_node, how.expert_overlap(axes.expert.nodes) * axes.beside_opposite
        passes_s = of.times.forward_s + of.times.backward_s
        return pass_waits_s(routed, axes.expert, self._network, passes_s, once_to_a_node=once, overlap=overlap)


def _with_casts(memory: SegmentMemory, segment: Segment, division: Division, fp8: Fp8Recipe | None) -> SegmentMemory:
    """And what the casts of the largest operand of a product in 8 bits need beside it."""
    if fp8 is None or not fp8.temporary_bytes:
        return memory
    shapes = [division.product(op) for op in segment.operators if is_weight_product(op) and op.name not in GROUPED]
    largest = max((max(m * k, k * n) for _, m, n, k in shapes), default=0.0)
    more = round(largest * fp8.temporary_bytes)
    return replace(memory, forward_extra=memory.forward_extra + more, backward_extra=memory.backward_extra + more)


def _held(numel: int, parts: TensorSplit, name: str, degree: int) -> int:
    return -(-numel // degree) if name in parts.parameters else numel


def _tied_parameters(graph: ModelGraph) -> int:
    """Elements of the embedding's weights that have a second name outside it."""
    tied = {name for group in graph.tied for name in group}
    return sum(p.numel for p in graph.embedding.parameters if p.name in tied)
