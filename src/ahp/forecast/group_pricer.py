"""Prices the parts of a step, and the memory of ranks, on the nodes of one group; results that layouts share are computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ahp.arrays import Ints
from ahp.cached_method import cached_method
from ahp.cluster.domains import joined
from ahp.cluster.model import NodeGroup
from ahp.engines.registry import traits_of
from ahp.engines.traits import ContextWay, Traits
from ahp.errors import bad_input
from ahp.forecast import memory
from ahp.forecast.assembly import num_groups, own_stages, recompute_of
from ahp.forecast.axes import Axes, axes_of, has_opposite_pass
from ahp.forecast.communication import Network, Times
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.group import strided_group
from ahp.forecast.groups import data_groups, expert_groups
from ahp.forecast.mesh import PipelineAxis, pipeline_axis
from ahp.forecast.muon import Between, Muon, places_of
from ahp.forecast.segment import Recompute, SegmentFigures
from ahp.forecast.sharing import SharedWeights, StageUnits
from ahp.forecast.stage import StageCosts, stage_costs
from ahp.forecast.stage_memory import StageMemory, received_bytes
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import Shards, state_bytes, unit_bytes, update_bytes, visiting_bytes
from ahp.forecast.units import UnitPricer, Units
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.schedule.makespan import Makespan
from ahp.schedule.stages import Ends, layer_ranges, layers_of_stages

LOSS_AND_NORM_BYTES = 16
"""Bytes that all ranks sum once per step: the loss and the squared norm of the gradient, in fp64."""

TIED_BYTES = 4
"""Bytes per gradient element of tied weights, which the first and the last stage sum in fp32."""


class GroupPricer:
    """The parts of forecasts for one model, job and engine on one group of nodes."""

    def __init__(
        self, graph: ModelGraph, group: NodeGroup, job: Job, choice: EngineChoice, *, in_cells: bool = False
    ) -> None:
        """``job``: as by ``priced.on_graph``. ``in_cells``: the nodes are a group of a mixed cluster, where each cell lies within one node or fills
        whole nodes.
        """
        self.graph, self.job, self.choice, self.in_cells = graph, job, choice, in_cells
        self.nodes = joined(group)
        """A node here is an NVLink domain, not a host as a launcher counts them."""
        self.network = Network(self.nodes)
        self.unit_pricer = UnitPricer(graph, self.nodes, self.network, job.precision)
        if choice.offload_optimizer:
            self._refuse_without_host_link()
        self.muon = Muon(graph, self.unit_pricer.rates, self.network) if job.optimizer.name == "muon" else None
        """Prices Muon's updates; None where AdamW updates everything."""
        self._ends: Ends = self.traits(Parallelism()).pipeline.ends
        self._ranges: dict[tuple[int, tuple[int, ...] | None], tuple[range, ...]] = {}

    def traits(self, parallelism: Parallelism) -> Traits:
        """How the engine behaves under a layout."""
        return traits_of(self.job, parallelism, self.choice)

    def methods(self, parallelism: Parallelism) -> list[ContextWay]:
        if parallelism.context_parallel_degree == 1 or parallelism.context_parallel_method is not None:
            return []
        traits = self.traits(parallelism)
        if len(traits.context.ways) == 1:
            return []
        return self.unit_pricer.ways(traits, parallelism.context_parallel_degree, parallelism.tensor_parallel_degree)

    def units(self, parallelism: Parallelism) -> Units:
        """The model's blocks and ends, priced for one rank of the layout and one micro-batch; lower bounds where the layout leaves
        context_parallel_method open."""
        traits = self.traits(parallelism)
        return self.unit_pricer.units(parallelism.micro_batch_size, self._axes(parallelism, traits), traits)

    def _axes(self, parallelism: Parallelism, traits: Traits) -> Axes:
        axes = axes_of(self._numbered(parallelism), self.nodes.devices_per_node, traits.experts.folded)
        may_hide = axes.expert.nodes > 1 or traits.experts.one_graph_in_mxfp8
        if axes.expert.size > 1 and may_hide and not has_opposite_pass(parallelism):
            axes = axes._replace(beside_opposite=False)
        return axes

    def _numbered(self, parallelism: Parallelism) -> Parallelism:
        """The layout whose ranks fill these nodes in order: with ``in_cells``, the layout of one cell."""
        if not self.in_cells:
            return parallelism
        return parallelism.model_copy(update={"pipeline_parallel_degree": 1, "data_parallel_replicate_degree": 1})

    def data_parallel(self, parallelism: Parallelism, traits: Traits) -> DataParallel:
        """How the ranks of these nodes share the weights of a layout."""
        per_node, numbered = self.nodes.devices_per_node, self._numbered(parallelism)
        data, experts = data_groups(numbered, per_node), expert_groups(numbered, per_node, traits.experts.folded)
        return DataParallel.on(self.nodes, traits, parallelism.num_micro_batches(self.job), data, experts)

    def stage_costs(
        self,
        units: Units,
        table: StageTable,
        data: DataParallel,
        recompute: Recompute,
        network: Times | None = None,
        passes_behind: Ints | int = 0,
    ) -> StageCosts:
        """Price the stages of one layout on these nodes. ``network`` prices their collectives; None = these nodes' own network."""
        shared = SharedWeights.of(StageUnits.of(units, data.traits, table), data, network or self.network)
        figures = SegmentFigures(units, [recompute], data)
        return stage_costs(figures, shared, data, self.unit_pricer.rates.bytes_per_s, passes_behind)

    def table(
        self, stages: Sequence[tuple[int, int, bool, bool]], recomputed: Sequence[int] | None = None
    ) -> StageTable:
        """A table of stages of this model; arguments as for ``StageTable.of``."""
        return StageTable.of(self.graph.layers, len(self.graph.blocks), stages, recomputed)

    def ranges(self, parallelism: Parallelism) -> tuple[range, ...]:
        """The layers of each stage."""
        key = parallelism.num_stages, parallelism.given_layers
        if key not in self._ranges:
            self._ranges[key] = layer_ranges(layers_of_stages(parallelism, self.graph.num_layers, ends=self._ends))
        return self._ranges[key]

    @cached_method
    def stage_table(self, ranges: tuple[range, ...], recomputed_layers: tuple[int, ...] | None = None) -> StageTable:
        last = len(ranges) - 1
        stages = [(own.start, own.stop, stage == 0, stage == last) for stage, own in enumerate(ranges)]
        return self.table(stages, recomputed_layers)

    @cached_method
    def sends_s(self, pairs: tuple[tuple[int, int], ...], axis: PipelineAxis, num_bytes: float) -> list[float]:
        """Seconds to send ``num_bytes`` from one pipeline rank to another, for each pair of ranks; computed once for all cuts."""

        def sent_s(source: int, target: int) -> float:
            if source == target:
                return 0.0
            return self.network.time_s("send_recv", num_bytes, axis.pair(source, target, self.nodes.devices_per_node))

        each = {pair: sent_s(*pair) for pair in dict.fromkeys(pairs)}
        return [each[pair] for pair in pairs]

    def norm_s(self, parallelism: Parallelism) -> float:
        """Seconds of the all-reduce of loss and norm."""
        world = strided_group(parallelism.world_size, 1, self.nodes.devices_per_node)
        return self.network.time_s("all_reduce", LOSS_AND_NORM_BYTES, world)

    def after_s(self, parallelism: Parallelism, units: Units) -> float:
        """Seconds once per step that no layer changes: the all-reduces of loss and norm, and of the gradient of tied weights."""
        return self.norm_s(parallelism) + self.tied_s(parallelism, units)

    def ranks_optimizer_s(
        self, parallelism: Parallelism, traits: Traits, span: Makespan, stages: StageMemory, between: Between = None
    ) -> list[tuple[float, float]]:
        """Seconds of each pipeline rank on one of these devices: (norm, clipping and update; copies from and to host memory)."""
        weights = stages.weights.of_ranks(own_stages(span))
        parameters: list[float] = np.asarray(weights.updated(Shards.of(parallelism, traits.experts.folded))).tolist()
        updates_s = [self.update_s(count, traits) for count in parameters]
        if self.muon is not None:
            places = places_of(self._numbered(parallelism), self.nodes.devices_per_node)
            layers = [self._layers_of_rank(parallelism, span, rank) for rank in range(span.p)]
            updates_s = np.add(updates_s, self.muon.ranks_s(layers, places, traits, between)).tolist()
        return [(update_s, self.offload_s(n, traits)) for update_s, n in zip(updates_s, parameters, strict=True)]

    def _layers_of_rank(self, parallelism: Parallelism, span: Makespan, rank: int) -> Counter[int]:
        """How many layers of each kind a pipeline rank holds."""
        ranges = self.ranges(parallelism)
        return Counter(self.graph.layers[layer] for stage in own_stages(span)[rank].tolist() for layer in ranges[stage])

    def update_s(self, parameters: float, traits: Traits) -> float:
        """Seconds of norm, clipping and AdamW for ``parameters`` on one device."""
        moved = update_bytes(self.job, traits, on_cpu=is_cpu(self.nodes.device))
        return parameters * moved / self.unit_pricer.rates.bytes_per_s

    def offload_s(self, parameters: float, traits: Traits) -> float:
        """Seconds to copy the states of ``parameters`` from host memory to one device and back, added up. Both ways run at the
        same time (runtime/optimizer/offload.py), but the catalogue has only one-way bandwidths of links to host memory."""
        if not traits.states.host_bytes:
            return 0.0
        bytes_per_s = self.nodes.device.host_bandwidth_bytes_per_s
        assert bytes_per_s is not None, "refused when this was made"
        return 2 * parameters * traits.states.trained_share * traits.states.host_bytes / bytes_per_s

    def _refuse_without_host_link(self) -> None:
        """Raises BadInput on CPUs, and where the bandwidth between these devices and their host's memory is not given."""
        device = self.nodes.device
        if is_cpu(device):
            rule = "on a CPU the optimizer's states are in the host's memory already"
            raise bad_input("engine.offload_optimizer", True, rule, [False])
        if device.host_bandwidth_bytes_per_s is None:
            rule = f"no bandwidth is given between a {device.name} and its host's memory; give device.host_bandwidth_bytes_per_s"
            raise bad_input("engine.offload_optimizer", True, rule, [False])

    def tied_bytes(self, units: Units) -> float:
        """Bytes of the gradient of weights that the first and the last stage share; adapters leave these weights as they are."""
        return TIED_BYTES * units.tied_parameters if self.job.lora is None else 0.0

    def tied_s(self, parallelism: Parallelism, units: Units) -> float:
        """Seconds to all-reduce the gradient of weights that the first and the last stage share."""
        p, num_bytes = parallelism.pipeline_parallel_degree, self.tied_bytes(units)
        if p == 1 or num_bytes == 0:
            return 0.0
        group = pipeline_axis(parallelism).pair(0, p - 1, self.nodes.devices_per_node)
        return self.network.time_s("all_reduce", num_bytes, group)

    def stage_memory(
        self, parallelism: Parallelism, traits: Traits, recomputed_layers: Sequence[int] | None = None
    ) -> StageMemory:
        """Memory of each stage on these devices. ``recomputed_layers``: of each stage; None = as in the layout."""
        units = self.units(parallelism)
        recompute = recompute_of(parallelism.activation_checkpoint, traits, units)
        some = recomputed_layers or parallelism.recomputed_layers_per_stage
        return StageMemory.of(
            units, recompute, self.stage_table(self.ranges(parallelism), None if some is None else tuple(some))
        )

    def ranks_memory(
        self, parallelism: Parallelism, traits: Traits, span: Makespan, stages: StageMemory
    ) -> memory.RanksMemory:
        """[p] Memory that each pipeline rank needs on one of these devices."""
        own, shards = own_stages(span), Shards.of(parallelism, traits.experts.folded)
        weights = stages.weights.of_ranks(own)
        visiting = visiting_bytes(weights, traits, shards)
        if self.muon is not None:
            owners = places_of(parallelism, self.nodes.devices_per_node).owners
            counts = (self._layers_of_rank(parallelism, span, rank) for rank in range(span.p))
            visiting = np.array([self.muon.held_bytes(count, owners) for count in counts])
        kept = np.rint(span.peak_kept(stages.kept.tolist()))
        units = unit_bytes(weights, traits, shards, span.m)
        parts = memory.while_training(
            state_bytes(weights, traits, shards, span.m),
            units,
            kept,
            memory.Peak.of(units, stages.in_layers[own].max(axis=1), stages.at_head[own].max(axis=1)),
            self._received_bytes(parallelism, traits, span, own),
            micro_batches=span.m, visiting=visiting,
        )  # fmt: skip
        outside = memory.Outside.of(self.nodes.device, num_groups(parallelism, traits.experts.folded))
        gap = stages.freed[own].max(axis=1) * traits.reduce.on_own_stream
        return memory.ranks_memory(parts, outside, memory.pooled_bytes(units, kept), gap)

    def _received_bytes(self, parallelism: Parallelism, traits: Traits, span: Makespan, own: Ints) -> Ints:
        receives = traits.pipeline.receives
        if receives == "waiting" and is_cpu(self.nodes.device):
            receives = "all"  # CPU workers ask for all messages before they compute (runtime/pipeline/schedules.py)
        return received_bytes(own, span.p, self.units(parallelism).hidden_bytes, span.m, receives, span.order)
