"""What one segment costs on one rank: time, memory, parameters and tensor-parallel traffic of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from ahp.cluster.model import NodeGroup
from ahp.engines.fp8 import Fp8Recipe
from ahp.engines.traits import ContextWay, FewKeys, Traits
from ahp.forecast.activations import ActivationLiveness, SegmentMemory
from ahp.forecast.axes import Axes
from ahp.forecast.chunked_head import chunked_head
from ahp.forecast.communication import Network
from ahp.forecast.compute import Launched, SegmentTimes, is_causal
from ahp.forecast.context import SharedTokens, shared_tokens_s
from ahp.forecast.dispatch import Routed, pass_waits_s
from ahp.forecast.division import GROUPED, Division, attention_heads, expert_parameters
from ahp.forecast.efficiency import Rates, is_cpu
from ahp.forecast.gpu import AttentionKernel
from ahp.forecast.group import CollectiveKind, Group
from ahp.forecast.kernels import Fusion, Kernels, kernels
from ahp.forecast.overlap import shown_s
from ahp.forecast.selective import last_read
from ahp.forecast.split import KeysWay, Role, TensorSplit, is_weight_product, split, way_of_keys
from ahp.forecast.unit import Unit
from ahp.graph.operators import ModelGraph, Operator, Segment, TensorSpec
from ahp.schedule.chunks import chunks

SCALE_BYTES = 4


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


class KernelOptions(NamedTuple):
    """The kernels of an engine."""

    fusion: Fusion
    fused_loss: bool
    attention: AttentionKernel | None
    accumulates: bool
    """Products for weight gradients add to the fp32 gradients."""
    tensor_in_pieces: bool
    gathers_again: bool
    tensor_copies: bool
    context: ContextWay
    context_sums_bytes: int
    loss_chunk_tokens: int | None
    weight_bytes: int
    """Of one weight element in the type that computes."""
    experts_gather_tokens: bool
    tokens_once_to_a_node: bool
    expert_overlap_between_nodes: float
    whole_biased_experts: bool
    few_keys: FewKeys
    fp8: Fp8Recipe | None
    """Of the products of blocks; None = they are not in 8 bits."""


@dataclass(frozen=True)
class _Run:
    """What of a segment no division changes."""

    segment: Segment
    split: TensorSplit
    kernels: Kernels
    in_8_bits: bool

    @cached_property
    def launched(self) -> Launched:
        return Launched(self.segment, self.kernels)

    @cached_property
    def held(self) -> ActivationLiveness:
        return ActivationLiveness(self.segment, self.kernels, self.split, fp8=self.in_8_bits)

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


class TensorCost(NamedTuple):
    """Seconds of a segment's tensor-parallel collectives for one micro-batch, and how many one pass has."""

    forward_s: float
    again_s: float
    """Of it, what is before the last result that the backward pass reads."""
    gather_s: float
    """Of it, all-gathers."""
    backward_s: float
    launches: int


class UnitPricer:
    """Prices the segments of one model on one kind of node; keeps what it has priced."""

    def __init__(self, graph: ModelGraph, nodes: NodeGroup, network: Network, precision: str) -> None:
        self._graph, self._network = graph, network
        self.rates = Rates(nodes.device, nodes.measured, nodes.devices_per_node)
        self._on_cpu = is_cpu(nodes.device)
        self._in_fp8 = precision == "fp8"
        self._causal = is_causal(graph)
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
        # On a CPU torch has no fused kernels but those of its compiler.
        fusion: Fusion = "traced" if self._on_cpu and traits.kernels.fusion != "fused" else traits.kernels.fusion
        return KernelOptions(
            fusion=fusion,
            fused_loss=traits.kernels.fused_loss,
            attention=traits.kernels.attention,
            accumulates=traits.gradients.fused_accumulation,
            tensor_in_pieces=traits.tensor.in_pieces and not self._on_cpu,
            gathers_again=traits.tensor.gathers_inputs_again,
            experts_gather_tokens=traits.experts.gather_tokens,
            tokens_once_to_a_node=traits.experts.tokens_once_to_a_node,
            expert_overlap_between_nodes=0.0 if self._on_cpu else traits.experts.overlap_between_nodes,
            whole_biased_experts=traits.experts.whole_biased,
            few_keys=traits.tensor.few_keys,
            tensor_copies=traits.tensor.copies,
            context=way,
            context_sums_bytes=traits.context.sums_bytes,
            loss_chunk_tokens=traits.kernels.loss_chunk_tokens,
            weight_bytes=traits.states.compute_weight_bytes or traits.states.master_weight_bytes,
            fp8=traits.fp8 if self._in_fp8 else None,
        )

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
        tensor = self._tensor(
            parts, axes, of.times, how, fp8=in_8_bits, sequences=micro_batch_size, num_unread=of.num_unread
        )
        if fp8 is not None and fp8.shares_scales:
            tensor = self._with_scales(tensor, parts, axes, segment)
        shared = self._shared_tokens(of, axes, how)
        return Unit(
            times=of.times,
            memory=of.memory,
            tensor_forward_s=tensor.forward_s,
            tensor_again_s=tensor.again_s,
            tensor_gather_s=tensor.gather_s,
            tensor_backward_s=tensor.backward_s,
            tensor_launches=tensor.launches,
            context_forward_s=shared.forward_s,
            context_again_s=0.0 if how.context == "ring" else shared.forward_s,
            context_backward_s=shared.backward_s,
            context_hidden_s=(shared.hidden_forward_s, shared.hidden_backward_s),
            expert_s=self._expert_s(of, micro_batch_size, axes, how),
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
                run.launched.beside_products_s(division, self.rates, causal=self._causal, kernel=how.attention)
            )
        return tuple(found)

    def _run(
        self, graph: ModelGraph, segment: Segment, role: Role, number: int, how: KernelOptions, tensor: int
    ) -> _Run:
        way: KeysWay = "parts" if role != "block" else way_of_keys(segment, tensor, how.few_keys)
        alike = graph.micro_batch_size, role, number, self._number(how), way
        if alike not in self._kernels:
            parts = split(segment, role, whole_biased_experts=how.whole_biased_experts, way_of_keys=way)
            fp8 = how.fp8 if role == "block" else None
            run = kernels(segment, how.fusion, fused_loss=how.fused_loss)
            self._kernels[alike] = _Run(segment, parts, run, fp8 is not None and fp8.keeps_in_8_bits)
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

    def _tensor(
        self,
        parts: TensorSplit,
        axes: Axes,
        times: SegmentTimes,
        how: KernelOptions,
        *,
        fp8: bool,
        sequences: int,
        num_unread: int,
    ) -> TensorCost:
        """What a segment's tensor-parallel collectives take.

        Without sequence parallelism partial sums are all-reduced. With it they are reduce-scattered along the sequence and
        gathered again before the next column product; the backward pass may gather the inputs once more for the weight
        gradients (arXiv 2205.05198, section 4.2.2). ``fp8``: what products read is gathered in 8 bits, sums stay in 16.
        ``num_unread``: of the sums, those at the end that nothing in the backward pass reads.
        """
        group, context = axes.tensor, axes.context.size
        of_heads_s = self._heads_s(parts, group, context)

        def total(kind: CollectiveKind, tensors: tuple[TensorSpec, ...]) -> float:
            part = 0.5 if fp8 and kind == "all_gather" else 1.0
            # One sequence gathered along its length lies in memory as it arrives.
            copied = how.tensor_copies and (kind == "reduce_scatter" or (kind == "all_gather" and sequences > 1))
            seconds = 0.0
            for spec in tensors:
                sent = part * spec.bytes / context
                seconds += self._network.time_s(kind, sent, group)
                seconds += self.rates.element_wise_s(2 * sent, 0.0, spec.dtype) if copied else 0.0
            return seconds

        count = len(parts.forward_reduce)
        unread = parts.forward_reduce[count - num_unread :]
        if not axes.sequence_parallel:
            forward, backward = total("all_reduce", parts.forward_reduce), total("all_reduce", parts.backward_reduce)
            forward, backward = forward + of_heads_s[0], backward + of_heads_s[1]
            return TensorCost(forward, forward - total("all_reduce", unread), 0.0, backward, count)
        hidden = tuple(spec for spec in parts.forward_reduce if len(spec.shape) > 1)
        rows = tuple(spec for spec in parts.forward_reduce if len(spec.shape) == 1)
        gathered = total("all_gather", parts.backward_reduce)
        forward = total("reduce_scatter", hidden) + gathered
        gathers = total("all_gather", hidden)
        gathers += gathered if how.gathers_again else 0.0
        if how.tensor_in_pieces:
            # A rank begins with its own piece and ends with it: one piece of each collective has nothing to run beside.
            overlap, beside_s = 1.0 - 1.0 / group.size, times.products.device_s
            forward, gathers, gathered = (shown_s(s, beside_s, overlap) for s in (forward, gathers, gathered))
        forward += total("all_reduce", rows) + of_heads_s[0]
        backward = gathers + total("reduce_scatter", parts.backward_reduce) + of_heads_s[1]
        backward += total("all_reduce", parts.summed_whole) - total("reduce_scatter", parts.summed_whole)
        again = max(0.0, forward - total("reduce_scatter", unread))
        return TensorCost(forward, again, gathered, backward, 2 * count)

    def _heads_s(self, parts: TensorSplit, group: Group, context: int) -> tuple[float, float]:
        """Seconds, forward and backward, of what comes of keys with fewer heads than ranks: gradients of whole keys are summed, or
        what is gathered of all heads is put together from the ranks' columns, and its gradients are cut into them."""
        forward, backward = 0.0, 0.0
        if parts.gathered_heads:
            sent = sum(spec.bytes for spec in parts.gathered_heads) / context
            copies_s = self.rates.element_wise_s(2 * sent, 0.0, parts.gathered_heads[0].dtype)
            forward = self._network.time_s("all_gather", sent, group) + copies_s
            backward = self._network.time_s("reduce_scatter", sent, group) + copies_s
        for spec in parts.key_gradients:
            backward += self._network.time_s("all_reduce", spec.bytes / context, group)
        return forward, backward

    def _with_scales(self, tensor: TensorCost, parts: TensorSplit, axes: Axes, segment: Segment) -> TensorCost:
        """And what it takes that ranks agree on the largest element of a weight, an input or a gradient that they share."""
        column, row = len(parts.column), len(parts.row)
        products = sum(is_weight_product(op) and op.name not in GROUPED for op in segment.phase("forward"))
        scale_s = self._network.time_s("all_reduce", SCALE_BYTES, axes.tensor) if axes.tensor.size > 1 else 0.0
        tokens_s = self._network.time_s("all_reduce", SCALE_BYTES, axes.context) if axes.context.size > 1 else 0.0
        return TensorCost(
            tensor.forward_s + (column + 2 * row) * scale_s + products * tokens_s,
            tensor.again_s + (column + 2 * row) * scale_s + products * tokens_s,
            tensor.gather_s,
            tensor.backward_s + column * scale_s + products * tokens_s,
            tensor.launches,
        )

    def _expert_s(self, of: _Divided, micro_batch_size: int, axes: Axes, how: KernelOptions) -> float:
        """Seconds that a pass waits for every token to reach the ranks of its experts, and for the answers."""
        grouped = of.grouped
        if axes.expert.size == 1 or grouped is None:
            return 0.0
        division, tokens = of.division, micro_batch_size * self._graph.sequence_length
        parts = 1 if how.experts_gather_tokens or not division.sequence_parallel else division.tensor
        routed = Routed.of(grouped, 1 / division.context / parts, tokens)
        once, overlap = how.tokens_once_to_a_node, how.expert_overlap_between_nodes * axes.beside_opposite
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
