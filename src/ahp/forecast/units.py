"""What one segment costs on one rank: time, memory, parameters and tensor-parallel traffic of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.cluster.model import NodeGroup
from ahp.engines.engine import Traits
from ahp.forecast.communication import Group, Network
from ahp.forecast.compute import SegmentTimes, is_causal, segment_times
from ahp.forecast.efficiency import Rates
from ahp.forecast.memory import SegmentMemory, segment_memory
from ahp.forecast.split import Role, split
from ahp.graph.operators import ModelGraph, Segment, TensorSpec


@dataclass(frozen=True, slots=True)
class Unit:
    """One segment on one rank, for one micro-batch."""

    times: SegmentTimes
    memory: SegmentMemory
    tensor_forward_s: float
    """Tensor-parallel collectives of the forward pass; nothing hides them."""
    tensor_backward_s: float
    parameters: int
    """Elements of its weights that the rank holds, before sharding over data ranks."""
    output_bytes: int


@dataclass(frozen=True)
class Units:
    """Every kind of segment of a model, for one micro-batch size and one tensor-parallel group."""

    embedding: Unit
    blocks: tuple[Unit, ...]
    layers: tuple[int, ...]
    head: Unit
    tied_parameters: int
    """Elements the rank holds of weights that the embedding and the head share."""
    hidden_bytes: int
    """What one stage sends to the next."""
    forward_flops: int
    """Of the whole model and one micro-batch."""


class UnitPricer:
    """Prices the segments of one model on one kind of node; keeps what it has priced."""

    def __init__(self, graph: ModelGraph, nodes: NodeGroup, network: Network) -> None:
        self._graph, self._network = graph, network
        self.rates = Rates(nodes.device, nodes.measured, nodes.devices_per_node)
        self._causal = is_causal(graph)
        self._graphs = {graph.micro_batch_size: graph}
        self._units: dict[tuple[int, Group, bool], Units] = {}

    def units(self, micro_batch_size: int, group: Group, traits: Traits) -> Units:
        """The units for a micro-batch size and a tensor-parallel group."""
        key = micro_batch_size, group, traits.fused_elementwise
        if key not in self._units:
            self._units[key] = self._price(self._at(micro_batch_size), group, traits.fused_elementwise)
        return self._units[key]

    def _at(self, micro_batch_size: int) -> ModelGraph:
        if micro_batch_size not in self._graphs:
            self._graphs[micro_batch_size] = self._graph.at(micro_batch_size)
        return self._graphs[micro_batch_size]

    def _price(self, graph: ModelGraph, group: Group, fused: bool) -> Units:
        embedding = self._unit(graph.embedding, "embedding", group, fused)
        hidden = graph.blocks[0].output if graph.blocks else graph.embedding.output
        return Units(
            embedding=embedding,
            blocks=tuple(self._unit(block, "block", group, fused) for block in graph.blocks),
            layers=graph.layers,
            head=self._unit(graph.head, "head", group, fused),
            tied_parameters=_tied_parameters(graph) // group.size,
            hidden_bytes=hidden.bytes if hidden else 0,
            forward_flops=graph.flops("forward"),
        )

    def _unit(self, segment: Segment, role: Role, group: Group, fused: bool) -> Unit:
        degree = group.size
        parts = split(segment, role)

        def reduce_s(tensors: tuple[TensorSpec, ...]) -> float:
            return sum(self._network.time_s("all_reduce", spec.bytes, group) for spec in tensors)

        return Unit(
            times=segment_times(segment, parts, self.rates, degree=degree, causal=self._causal, fused=fused),
            memory=segment_memory(segment, parts, degree),
            tensor_forward_s=reduce_s(parts.forward_reduce),
            tensor_backward_s=reduce_s(parts.backward_reduce),
            parameters=sum(
                -(-p.numel // degree) if p.name in parts.parameters else p.numel for p in segment.parameters
            ),
            output_bytes=segment.output.bytes if segment.output else 0,
        )


def _tied_parameters(graph: ModelGraph) -> int:
    """Elements of the embedding's weights that have a second name outside it."""
    tied = {name for group in graph.tied for name in group}
    return sum(p.numel for p in graph.embedding.parameters if p.name in tied)
