"""Prices layouts of one model, cluster, job and engine; results that layouts share are computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ahp.arrays import Ints
from ahp.cached_method import cached_method
from ahp.cluster.domains import joined
from ahp.cluster.model import Cluster
from ahp.engines.traits import ContextWay, Traits
from ahp.errors import bad_input
from ahp.forecast import memory
from ahp.forecast.assembly import (
    band_s,
    flop_convention,
    message_bytes,
    num_groups,
    own_stages,
    passes_behind,
    pipeline_span,
    recompute_of,
    slowest_share,
    step_error,
    step_flops,
    unrun,
    whole_step,
)
from ahp.forecast.axes import Axes, axes_of, has_opposite_pass
from ahp.forecast.beside_stages import BesideStages, gathers_beside, gathers_s, reductions_s, share_beside
from ahp.forecast.communication import Network, Times
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.group import strided_group
from ahp.forecast.groups import data_groups, expert_groups
from ahp.forecast.mesh import PipelineAxis, pipeline_axis
from ahp.forecast.muon import Between, Muon, places_of
from ahp.forecast.priced import LayoutPricer, Priced, faster
from ahp.forecast.segment import Recompute, SegmentFigures
from ahp.forecast.sharing import SharedWeights, StageUnits
from ahp.forecast.stage import StageCost, StageCosts, stage_costs
from ahp.forecast.stage_memory import StageMemory, received_bytes
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import Shards, state_bytes, unit_bytes, update_bytes, visiting_bytes
from ahp.forecast.turns import share, turns
from ahp.forecast.units import UnitPricer, Units
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism
from ahp.schedule.bounds import TimeColumns, lower_bounds_s
from ahp.schedule.makespan import Makespan
from ahp.schedule.orders import ranks_of_stages
from ahp.schedule.simulate import StageTimes
from ahp.schedule.stages import Ends, layer_ranges, layers_of_stages

LOSS_AND_NORM_BYTES = 16
"""Bytes that all ranks sum once per step: the loss and the squared norm of the gradient, in fp64."""

TIED_BYTES = 4
"""Bytes per gradient element of tied weights, which the first and the last stage sum in fp32."""


class _Begun(NamedTuple):
    """A legal layout whose schedule is not run yet."""

    parallelism: Parallelism
    traits: Traits
    units: Units
    stages: tuple[StageCost, ...]
    times: list[StageTimes]


class Pricer(LayoutPricer):
    """Forecasts for one model, cluster, job and engine."""

    def __init__(
        self, graph: ModelGraph, cluster: Cluster, job: Job, choice: EngineChoice, *, in_cells: bool = False
    ) -> None:
        """``in_cells``: the nodes are a group of a mixed cluster, where each cell lies within one node or fills whole nodes."""
        super().__init__(graph, cluster, job, choice)
        self.in_cells = in_cells
        self.nodes = joined(cluster.groups[0])
        """A node here is an NVLink domain, not a host as a launcher counts them."""
        self.network = Network(self.nodes)
        self.slowest_share = 0.0 if is_cpu(self.nodes.device) else slowest_share(cluster.num_devices)
        self.ratio = self.nodes.calibration.step_ratio if self.nodes.calibration else 1.0
        # Each group of a mixed cluster is probed by itself, so whether waiting workers leave cores to others is not known there.
        self.turns = 1.0 if in_cells else turns(self.nodes)
        self.unit_pricer = UnitPricer(graph, self.nodes, self.network, job.precision)
        if choice.offload_optimizer:
            self._refuse_without_host_link()
        self.muon = Muon(graph, self.unit_pricer.rates, self.network) if job.optimizer.name == "muon" else None
        """Prices Muon's updates; None where AdamW updates everything."""
        self._ends: Ends = self.traits(Parallelism()).pipeline.ends
        self._ranges: dict[tuple[int, tuple[int, ...] | None], tuple[range, ...]] = {}
        self._made: dict[tuple[object, ...], dict[tuple[object, ...], StageCost]] = {}
        """Stage costs keyed by (units, data, recompute), then by the stage's layers and place; cuts and schedules of a layout share them."""

    def methods(self, parallelism: Parallelism) -> list[ContextWay]:
        if parallelism.context_parallel_degree == 1 or parallelism.context_parallel_method is not None:
            return []
        traits = self.traits(parallelism)
        return self.unit_pricer.ways(self._axes(parallelism, traits), traits) if len(traits.context.ways) > 1 else []

    def _price(self, parallelism: Parallelism) -> Priced:
        return self._finished(self._begun(parallelism))

    def _fastest(self, ways: Sequence[Parallelism]) -> Priced:
        """The schedule of a layout that cannot be the fastest is not run."""
        begun = [self._begun(way) for way in ways]
        bounds_s = [self._bound_s(one.parallelism, one.times) for one in begun]
        found: dict[int, Priced] = {}
        for at in sorted(range(len(ways)), key=bounds_s.__getitem__):
            best = faster(found.values()).forecast if found else None
            if best is None or not best.fits or bounds_s[at] <= best.step_time_s:
                found[at] = self._finished(begun[at])
        return faster(found[at] for at in sorted(found))

    def bound_s(self, parallelism: Parallelism) -> float:
        """Lower bound in seconds of the step of a layout that leaves nothing open, found without running its schedule. Raises like ``price``."""
        return self._bound_s(parallelism, self._begun(parallelism).times)

    def _bound_s(self, parallelism: Parallelism, times: Sequence[StageTimes]) -> float:
        """``times``: of the layout's stages."""
        if parallelism.pipeline_parallel_order is not None:
            return 0.0
        return self.bounds_s(parallelism, [times])[0]

    def bounds_s(self, parallelism: Parallelism, cuts: Sequence[Sequence[StageTimes]]) -> list[float]:
        """Lower bound in seconds of a layout's step for each of some cuts, from the times of their stages: the longest path through the
        schedule that has a closed form."""
        of = parallelism
        shape = of.pipeline_parallel_schedule, of.pipeline_parallel_degree, of.virtual_stages_per_rank
        found = lower_bounds_s(*shape, of.num_micro_batches(self.job), TimeColumns.of(*cuts), turns=self.turns)
        return (found * self.stretch).tolist()

    def _begun(self, parallelism: Parallelism) -> _Begun:
        traits = self.legal_traits(parallelism)
        units = self.units(parallelism)
        return _Begun(
            parallelism, traits, units, *self._timed(parallelism, units, self.data_parallel(parallelism, traits))
        )

    def _finished(self, begun: _Begun) -> Priced:
        parallelism, traits, units, stages, times = begun
        stages, span = self._run(parallelism, stages, times)
        stage_memory = self.stage_memory(parallelism, traits)
        update_s, offload_s = self._optimizer_s(parallelism, traits, span, stage_memory)
        tied_s = self.tied_s(parallelism, units)
        step_s, step = whole_step(span, stages, tied_s, update_s, offload_s, self.slowest_share)
        if self.ratio != 1.0:
            step_s, step = step_s * self.ratio, {part: seconds * self.ratio for part, seconds in step.items()}
        ranks = self.ranks_memory(parallelism, traits, span, stage_memory)
        fullest = int(np.argmax(ranks.total))
        return Priced(
            self._forecast(parallelism, step_s, step, fullest, ranks.of(fullest), units),
            parallelism, span, stages, stage_memory, ratio=self.ratio,
        )  # fmt: skip

    def _run(
        self, parallelism: Parallelism, stages: tuple[StageCost, ...], times: list[StageTimes]
    ) -> tuple[tuple[StageCost, ...], Makespan]:
        """The stages and the makespan of their schedule; where workers share cores, both are scaled by the cores that waiting workers free."""
        span = pipeline_span(parallelism, parallelism.num_micro_batches(self.job), times)
        if self.turns == 1.0 or span.p == 1:
            return stages, span
        part = share(span.timeline, pipeline_axis(parallelism), self.nodes.devices_per_node, self.turns)
        times = [one.scaled(part) for one in times]
        return tuple(one.scaled(part) for one in stages), pipeline_span(parallelism, span.m, times)

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

    def stage_times(self, parallelism: Parallelism, cuts: Sequence[tuple[int, ...]]) -> list[list[StageTimes]]:
        """Times of each stage of a legal layout, for each cut (the layers of each stage); neither schedule nor memory is computed."""
        units, data = self.units(parallelism), self.data_parallel(parallelism, self.traits(parallelism))
        cut = (parallelism.model_copy(update={"layers_per_stage": layers}) for layers in cuts)
        return [self._timed(layout, units, data)[1] for layout in cut]

    def _timed(
        self, parallelism: Parallelism, units: Units, data: DataParallel
    ) -> tuple[tuple[StageCost, ...], list[StageTimes]]:
        """Stage costs that count only what a stage waits for, and stage times that also have the collectives overlapped with it."""
        costs = self._stages(parallelism, units, data)
        beside = self._beside(parallelism, units, data, costs)
        stages = beside.stages(costs)
        neighbours = tuple(pairwise(ranks_of_stages(parallelism)))
        sends_s = self.sends_s(neighbours, pipeline_axis(parallelism), message_bytes(parallelism, data.traits, units))
        return stages, beside.times(parallelism, stages, sends_s, sends_s)

    def units(self, parallelism: Parallelism) -> Units:
        """The model's blocks and ends, priced for one rank of the layout and one micro-batch; lower bounds where the layout leaves
        context_parallel_method open."""
        traits = self.traits(parallelism)
        return self.unit_pricer.units(parallelism.micro_batch_size, self._axes(parallelism, traits), traits)

    def decided(self, parallelism: Parallelism) -> Parallelism:
        """The layout with the context_parallel_method that its price uses, where the engine has several methods."""
        if not self.methods(parallelism):
            return parallelism
        method = self.price(parallelism).parallelism.context_parallel_method
        return parallelism.model_copy(update={"context_parallel_method": method})

    def _stages(self, parallelism: Parallelism, units: Units, data: DataParallel) -> tuple[StageCost, ...]:
        ranges = self.ranges(parallelism)
        recompute = recompute_of(parallelism.activation_checkpoint, data.traits, units)
        made = self._made.setdefault((units, data, recompute), {})
        some = parallelism.recomputed_layers_per_stage or (None,) * len(ranges)
        keys, new = [], {}
        for index, layers in enumerate(ranges):
            first, last = index == 0, index == len(ranges) - 1
            behind = passes_behind(parallelism, index) if data.traits.reduce.overlap else 0
            key = self.graph.layers[layers.start : layers.stop], first, last, some[index], behind
            keys.append(key)
            if key not in made:
                new[key] = layers.start, layers.stop, first, last
        if new:
            recomputed = [len(kinds) if count is None else count for kinds, _, _, count, _ in new]
            behind = np.array([key[-1] for key in new], dtype=np.int64)
            table = self.table(list(new.values()), recomputed)
            costs = self.stage_costs(units, table, data, recompute, passes_behind=behind)
            made |= zip(new, costs.rows(table), strict=True)
        return tuple(made[key] for key in keys)

    def _beside(
        self, parallelism: Parallelism, units: Units, data: DataParallel, costs: Sequence[StageCost]
    ) -> BesideStages:
        gathers, reductions = list[float](), list[float]()
        if gathers_beside(parallelism, data):
            gathers = gathers_s(units, self._table(self.ranges(parallelism)), data, self.network)
        if share_beside(parallelism.virtual_stages_per_rank, data.traits, data.overlap):
            reductions = reductions_s(parallelism, costs)
        return BesideStages(ranks_of_stages(parallelism), gathers, reductions)

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
    def sends_s(self, pairs: tuple[tuple[int, int], ...], axis: PipelineAxis, num_bytes: float) -> list[float]:
        """Seconds to send ``num_bytes`` from one pipeline rank to another, for each pair of ranks; computed once for all cuts."""

        def sent_s(source: int, target: int) -> float:
            if source == target:
                return 0.0
            return self.network.time_s("send_recv", num_bytes, axis.pair(source, target, self.nodes.devices_per_node))

        each = {pair: sent_s(*pair) for pair in dict.fromkeys(pairs)}
        return [each[pair] for pair in pairs]

    def _optimizer_s(
        self, parallelism: Parallelism, traits: Traits, span: Makespan, stages: StageMemory
    ) -> tuple[float, float]:
        """Seconds on the slowest rank: (norm, clipping and update with the all-reduce of loss and norm; copies of states from
        and to host memory)."""
        update_s, offload_s = max(self.ranks_optimizer_s(parallelism, traits, span, stages), key=sum)
        return update_s + self._norm_s(parallelism), offload_s

    def _norm_s(self, parallelism: Parallelism) -> float:
        """Seconds of the all-reduce of loss and norm."""
        world = strided_group(parallelism.world_size, 1, self.nodes.devices_per_node)
        return self.network.time_s("all_reduce", LOSS_AND_NORM_BYTES, world)

    def after_s(self, parallelism: Parallelism, units: Units) -> float:
        """Seconds once per step that no layer changes: the all-reduces of loss and norm, and of the gradient of tied weights."""
        return self._norm_s(parallelism) + self.tied_s(parallelism, units)

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

    def tied_s(self, parallelism: Parallelism, units: Units) -> float:
        """Seconds to all-reduce the gradient of weights that the first and the last stage share."""
        p = parallelism.pipeline_parallel_degree
        if p == 1 or units.tied_parameters == 0 or self.job.lora is not None:
            return 0.0
        group = pipeline_axis(parallelism).pair(0, p - 1, self.nodes.devices_per_node)
        return self.network.time_s("all_reduce", TIED_BYTES * units.tied_parameters, group)

    def needs(self, parallelism: Parallelism) -> list[float]:
        """Device bytes that each pipeline rank of a legal layout needs, found without running its schedule."""
        traits = self.traits(parallelism)
        span = unrun(parallelism, parallelism.num_micro_batches(self.job))
        stages = self.stage_memory(parallelism, traits)
        return self.ranks_memory(parallelism, traits, span, stages).total.tolist()

    def stage_memory(
        self, parallelism: Parallelism, traits: Traits, recomputed_layers: Sequence[int] | None = None
    ) -> StageMemory:
        """Memory of each stage on these devices. ``recomputed_layers``: of each stage; None = as in the layout."""
        units = self.units(parallelism)
        recompute = recompute_of(parallelism.activation_checkpoint, traits, units)
        some = recomputed_layers or parallelism.recomputed_layers_per_stage
        return StageMemory.of(
            units, recompute, self._table(self.ranges(parallelism), None if some is None else tuple(some))
        )

    @cached_method
    def _table(self, ranges: tuple[range, ...], recomputed_layers: tuple[int, ...] | None = None) -> StageTable:
        last = len(ranges) - 1
        stages = [(own.start, own.stop, stage == 0, stage == last) for stage, own in enumerate(ranges)]
        return self.table(stages, recomputed_layers)

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

    def activation_bytes(self, priced: Priced) -> memory.Floats:
        """[1, p] Bytes of activations that each pipeline rank can keep and still fit; all replicas are the same."""
        layout = priced.parallelism
        traits = self.traits(layout)
        ranks = self.ranks_memory(layout, traits, priced.span, priced.memory)
        return memory.activation_room(ranks, self.nodes.device.memory_bytes, priced.span.m)[None]

    def memory_of_places(self, priced: Priced) -> list[memory.PlaceMemory]:
        """Memory that the ranks at each place of the pipeline need; all replicas are the same."""
        layout, device = priced.parallelism, self.nodes.device
        traits = self.traits(layout)
        needs, axis = self.ranks_memory(layout, traits, priced.span, priced.memory), pipeline_axis(layout)
        return [
            memory.PlaceMemory(
                tuple(place * axis.stride + offset for offset in axis.offsets),
                device.name,
                device.memory_bytes,
                needs.of(place),
            )
            for place in range(priced.span.p)
        ]

    def _received_bytes(self, parallelism: Parallelism, traits: Traits, span: Makespan, own: Ints) -> Ints:
        receives = traits.pipeline.receives
        if receives == "waiting" and is_cpu(self.nodes.device):
            receives = "all"  # CPU workers ask for all messages before they compute (runtime/pipeline/schedules.py)
        return received_bytes(own, span.p, self.units(parallelism).hidden_bytes, span.m, receives, span.order)

    def _forecast(
        self,
        parallelism: Parallelism,
        step_s: float,
        step: dict[str, float],
        rank: int,
        used: memory.RankMemory,
        units: Units,
    ) -> Forecast:
        device, world = self.nodes.device, parallelism.world_size
        low_s, high_s = band_s(step_s, step_error(self.nodes), centred=self.nodes.calibration is not None)
        peak = device.peak(self.job.precision)
        model_flops = step_flops(self.job, parallelism, units)
        probability = memory.fit_probability(used.total, device.memory_bytes)
        return Forecast(
            step_time_s=step_s,
            step_time_low_s=low_s,
            step_time_high_s=high_s,
            tokens_per_s_per_device=self.job.tokens_per_step / (step_s * world),
            mfu=model_flops / (step_s * world * peak),
            mfu_peak=f"{device.name}, dense {self.job.precision} peak {peak / 1e12:.4g} TFLOP/s; {flop_convention(self.job)}",
            memory_allocated_bytes=used.allocated,
            memory_reserved_bytes=used.reserved,
            fit_probability=probability,
            fits=probability >= memory.FIT_PROBABILITY,
            step=step,
            memory=used.parts,
            fullest_rank=rank * pipeline_axis(parallelism).stride,
        )
