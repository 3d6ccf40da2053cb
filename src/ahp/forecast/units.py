"""The cost of one segment on one rank: time, memory, parameters and tensor-parallel traffic of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ahp.cached_method import cached_method
from ahp.cluster.model import NodeGroup
from ahp.engines.fp8 import Fp8Recipe
from ahp.engines.traits import WHOLE_DOCUMENTS, ContextTraits, ContextWay, Traits
from ahp.forecast.activations import Policy, SegmentMemory
from ahp.forecast.axes import Axes
from ahp.forecast.chunked_head import chunked_head, num_chunks
from ahp.forecast.communication import Network
from ahp.forecast.compute import SegmentTimes, Work
from ahp.forecast.context import SharedTokens, shared_tokens_s
from ahp.forecast.dispatch import Routed, all_to_all_s, arrived_bytes, numbers_s, pass_waits_s, sorted_s
from ahp.forecast.divided import Divided, SegmentPricer
from ahp.forecast.division import attention_heads, expert_parameters
from ahp.forecast.group import Group
from ahp.forecast.kernel_options import KernelOptions
from ahp.forecast.split import Role
from ahp.forecast.tensor_collectives import TensorCollectives, TensorCost
from ahp.forecast.unit import Unit
from ahp.graph.operators import ModelGraph, Segment


@dataclass(frozen=True, eq=False)
class Units:
    """Every kind of segment of a model, for one micro-batch size and one set of axes. The pricer makes each once, so two are
    equal only if they are one object."""

    embedding: Unit
    blocks: tuple[Unit, ...]
    layers: tuple[int, ...]
    head: Unit
    tied_parameters: int
    """Elements the rank holds of weights that the embedding and the head share."""
    hidden_bytes: int
    """Bytes of the hidden states between two blocks that a rank holds, and sends to the next stage."""
    output_bytes: int
    """Bytes of them that a stage keeps after it has sent them."""
    forward_flops: int
    """FLOPs of the whole model's forward pass for one micro-batch."""


def least_of(ways: list[Units]) -> Units:
    """The least of each figure over units that differ only in how context ranks see each other's tokens, and so perhaps in whether
    attention needs masks."""
    if len(ways) == 1:
        return ways[0]
    return replace(
        ways[0],
        embedding=_least([units.embedding for units in ways]),
        blocks=tuple(map(_least, zip(*(units.blocks for units in ways), strict=True))),
        head=_least([units.head for units in ways]),
    )


def _least(alike: Sequence[Unit]) -> Unit:
    """The least of each figure of a segment's units that hold the same weights."""
    if all(unit is alike[0] for unit in alike):
        return alike[0]
    context = SharedTokens(*map(min, zip(*(unit.context for unit in alike), strict=True)))
    one = replace(alike[0], context=context)
    if all(unit.times is one.times and unit.memory is one.memory for unit in alike):
        return one
    return replace(
        one,
        times=SegmentTimes(**_least_fields([unit.times for unit in alike], _least_work)),
        memory=SegmentMemory(**_least_fields([unit.memory for unit in alike], _least_bytes)),
        tensor=TensorCost(*map(min, zip(*(unit.tensor for unit in alike), strict=True))),
        expert_s=min(unit.expert_s for unit in alike),
        back_s=max(unit.back_s for unit in alike),
    )


def _least_fields(alike: Sequence[Any], least: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    return {field.name: least([getattr(one, field.name) for one in alike]) for field in fields(alike[0])}


def _least_work(alike: Sequence[Work]) -> Work:
    return Work(min(one.device_s for one in alike), min(one.launches for one in alike))


def _least_bytes(alike: Sequence[Any]) -> Any:
    return min(alike) if isinstance(alike[0], int) else Policy(**_least_fields(alike, min))


class UnitPricer:
    """Prices the segments of one model on one kind of node; keeps what it has priced."""

    def __init__(self, graph: ModelGraph, nodes: NodeGroup, network: Network, precision: str) -> None:
        self._graph, self._network = graph, network
        self.segments = SegmentPricer.of(graph, nodes)
        self._by_lengths = None if graph.by_lengths is None else SegmentPricer.of(graph.by_lengths, nodes)
        """Of the graph in which attention goes by the lengths of documents."""
        self.rates = self.segments.rates
        self._tensor = TensorCollectives(self.rates, network)
        self._generation = self.rates.gpu.generation if self.rates.gpu else None
        self._in_fp8 = precision == "fp8"
        self._has_experts = any(map(expert_parameters, graph.blocks))
        self._heads = [attention_heads(block) for block in graph.blocks]
        self._communicating: dict[tuple[object, ...], Unit] = {}
        """Keyed by the divided segment and the groups that it communicates in."""

    @cached_method
    def units(self, micro_batch_size: int, axes: Axes, traits: Traits) -> Units:
        """The units for a micro-batch size and the groups that divide it; where the engine has several ways to share sequences,
        the least of each figure over these ways."""
        return least_of(
            [
                self._units_by(way, micro_batch_size, axes, traits)
                for way in self.ways(traits, axes.context.size, axes.tensor.size)
            ]
        )

    def ways(self, traits: Traits, context: int, tensor: int) -> list[ContextWay]:
        """The ways in which ``context`` ranks can see each other's tokens: all-to-all needs the same number of heads on every rank."""
        if context == 1 or len(traits.context.ways) == 1:
            return [traits.context.ways[0]]
        ranks = context * tensor
        uneven = any(heads % ranks for heads in self._heads)
        return [way for way in traits.context.ways if way != "all-to-all" or not uneven]

    @cached_method
    def _shared_tokens(self, of: Divided, group: Group, way: ContextWay, how: ContextTraits) -> SharedTokens:
        return shared_tokens_s(of.attention, of.division, group, of.times, way, how, self.rates, self._network)

    @cached_method
    def how(self, traits: Traits, way: ContextWay, context: int) -> KernelOptions:
        """The kernels of an engine on these devices, where ``context`` ranks share each sequence."""
        return KernelOptions.of(
            traits,
            way,
            self._generation,
            in_fp8=self._in_fp8,
            has_experts=self._has_experts,
            whole_documents=self._by_lengths is not None and (context == 1 or way in WHOLE_DOCUMENTS),
        )

    def _segments_of(self, how: KernelOptions) -> SegmentPricer:
        """The pricer of the graph that runs with these kernels."""
        return self._by_lengths if how.by_lengths and self._by_lengths is not None else self.segments

    def beside_products_s(
        self, traits: Traits, micro_batch_size: int, tensor: int, sequence_parallel: bool, context: int
    ) -> tuple[float, ...]:
        """Least device seconds of both passes without products, for each kind of block, over the ways in which context ranks can see each
        other's tokens; quick to find."""
        ways = self.ways(traits, context, tensor)
        kinds = {self.how(traits, way, context) for way in ways}
        if "all-to-all" in ways:  # which joins nothing
            kinds = {how._replace(context="all-to-all") for how in kinds}
        divided = micro_batch_size, tensor, sequence_parallel, context
        each = [self._segments_of(how).beside_products_s(*divided, how) for how in kinds]
        return tuple(map(min, zip(*each, strict=True)))

    def _units_by(self, way: ContextWay, micro_batch_size: int, axes: Axes, traits: Traits) -> Units:
        return self._price(micro_batch_size, axes, self.how(traits, way, axes.context.size))

    @cached_method
    def _price(self, micro_batch_size: int, axes: Axes, how: KernelOptions) -> Units:
        graph = self._segments_of(how).at(micro_batch_size)
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
            output_bytes=how.keeps_outputs * hidden_bytes // cut,
            forward_flops=self._segments_of(how).forward_flops(graph.micro_batch_size),
        )

    def _head(self, graph: ModelGraph, axes: Axes, how: KernelOptions, hidden_bytes: int) -> Unit:
        count, most_tokens = how.kernels.loss_chunks, how.kernels.loss_chunk_tokens
        if most_tokens is not None:
            count = num_chunks(graph.micro_batch_size, graph.sequence_length // axes.context.size, most_tokens)
        elif count == 1:
            return self._unit(graph, graph.head, "head", 0, axes, how)
        # Chunks divide the micro-batch in the same way as context-parallel ranks do.
        context = replace(axes.context, size=axes.context.size * count)
        one = self._unit(graph, graph.head, "head", 0, axes._replace(context=context), how)
        return chunked_head(
            one,
            count,
            weights=one.weights.parameters + _tied_parameters(graph) // axes.tensor.size,
            weight_bytes=how.weight_bytes,
            hidden_bytes=hidden_bytes,
            rates=self.rates,
        )

    def _unit(
        self, graph: ModelGraph, segment: Segment, role: Role, number: int, axes: Axes, how: KernelOptions,
    ) -> Unit:  # fmt: skip
        of = self._segments_of(how).divided(graph, segment, role, number, axes, how)
        fp8 = how.fp8 if role == "block" else None  # engines leave the head in the compute type
        context = (axes.context, how.context) if of.attention or fp8 is not None else None
        expert = (axes.expert, axes.beside_opposite) if of.grouped else None
        key = of, axes.tensor, axes.sequence_parallel, context, expert
        if key not in self._communicating:
            self._communicating[key] = self._in_groups(of, graph.micro_batch_size, segment, axes, how, fp8)
        return self._communicating[key]

    def _in_groups(
        self,
        of: Divided,
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
        routed = self._routed(of, micro_batch_size, axes, how)
        return Unit(
            times=of.times,
            memory=of.memory if routed is None else _with_arrived(of.memory, routed, axes.expert, how),
            tensor=tensor,
            context=self._shared_tokens(of, axes.context, how.context, how.sharing),
            expert_s=self._expert_s(of, routed, axes, how),
            back_s=0.0 if routed is None else self._left_out_s(of, routed, axes.expert, how),
            weights=of.weights,
            # The host waits for each expert's number of tokens before it prepares the experts' products.
            stalled_launches=how.expert_operators[0] if of.weights.experts and not how.one_graph else 0.0,
        )

    def _routed(self, of: Divided, micro_batch_size: int, axes: Axes, how: KernelOptions) -> Routed | None:
        """The tokens that a rank sends to experts of other ranks; None where it has all experts."""
        if axes.expert.size == 1 or of.grouped is None:
            return None
        division, tokens = of.division, micro_batch_size * self._graph.sequence_length
        parts = 1 if how.experts.gather_tokens or not division.sequence_parallel else division.tensor
        return Routed.of(of.grouped, 1 / division.context / parts, tokens)

    def _left_out_s(self, of: Divided, routed: Routed, group: Group, how: KernelOptions) -> float:
        """Seconds of the way back of results that a second run does not need."""
        if not how.experts.leaves_results or of.reads_results:
            return 0.0
        return all_to_all_s(routed, group, self._network, how.experts)

    def _expert_s(self, of: Divided, routed: Routed | None, axes: Axes, how: KernelOptions) -> float:
        """Seconds that a pass waits for every token to reach the ranks of its experts, and for the results."""
        if routed is None or of.grouped is None:
            return 0.0
        division = of.division
        overlap = how.expert_overlap(axes.expert.nodes) * axes.beside_opposite
        passes_s = of.times.forward_s + of.times.backward_s
        waits_s = pass_waits_s(routed, axes.expert, self._network, passes_s, how.experts, overlap=overlap)
        waits_s += (1.0 - overlap) * numbers_s(routed, axes.expert, self._network, how.experts)
        if how.one_graph:  # its recipes have HybridEP, which sorts what it sends
            return waits_s
        computed = 1 / division.context / (division.tensor if how.experts.folded else 1)
        return waits_s + sorted_s(of.grouped, computed, axes.expert, how.experts, self.rates)


def _with_arrived(memory: SegmentMemory, routed: Routed, group: Group, how: KernelOptions) -> SegmentMemory:
    """``memory`` with what selective recompute keeps of the tokens that were sent to experts and back."""
    more = round(how.keeps_arrived * arrived_bytes(routed, group, how.experts))
    beside, second = (
        replace(policy, kept=policy.kept + more) for policy in (memory.beside_products, memory.every_second_product)
    )
    return replace(memory, beside_products=beside, every_second_product=second)


def _tied_parameters(graph: ModelGraph) -> int:
    """Elements of the embedding's weights that are tied to a weight outside it."""
    tied = {name for group in graph.tied for name in group}
    return sum(p.numel for p in graph.embedding.parameters if p.name in tied)
