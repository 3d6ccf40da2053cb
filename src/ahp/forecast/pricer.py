"""Prices layouts of one model, cluster, job and engine; results that layouts share are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ahp.cluster.model import Cluster
from ahp.engines.traits import ContextWay, Traits
from ahp.forecast import memory
from ahp.forecast.assembly import (
    band_s,
    flop_convention,
    message_bytes,
    passes_behind,
    pipeline_span,
    recompute_of,
    slowest_share,
    step_error,
    step_flops,
    unrun,
    whole_step,
)
from ahp.forecast.beside_stages import BesideStages, gathers_beside, gathers_s, reductions_s, share_beside
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.group_pricer import GroupPricer
from ahp.forecast.mesh import pipeline_axis
from ahp.forecast.priced import LayoutPricer, Priced, faster
from ahp.forecast.stage import StageCost
from ahp.forecast.stage_memory import StageMemory
from ahp.forecast.turns import share, turns
from ahp.forecast.units import Units
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism
from ahp.schedule.bounds import TimeColumns, lower_bounds_s
from ahp.schedule.makespan import Makespan
from ahp.schedule.orders import ranks_of_stages
from ahp.schedule.simulate import StageTimes


class _Begun(NamedTuple):
    """A legal layout whose schedule is not run yet."""

    parallelism: Parallelism
    traits: Traits
    units: Units
    stages: tuple[StageCost, ...]
    times: list[StageTimes]


class Pricer(LayoutPricer):
    """Forecasts for one model, cluster, job and engine, from prices of one group of nodes."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, job: Job, choice: EngineChoice) -> None:
        super().__init__(graph, cluster, job, choice)
        self.group = GroupPricer(graph, cluster.groups[0], self.job, choice)
        nodes = self.group.nodes
        self.slowest_share = 0.0 if is_cpu(nodes.device) else slowest_share(cluster.num_devices)
        self.ratio = nodes.calibration.step_ratio if nodes.calibration else 1.0
        self.turns = turns(nodes)
        self._made: dict[tuple[object, ...], dict[tuple[object, ...], StageCost]] = {}
        """Stage costs keyed by (units, data, recompute), then by the stage's layers and place; cuts and schedules of a layout share them."""

    def methods(self, parallelism: Parallelism) -> list[ContextWay]:
        return self.group.methods(parallelism)

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
        units = self.group.units(parallelism)
        return _Begun(
            parallelism, traits, units, *self._timed(parallelism, units, self.group.data_parallel(parallelism, traits))
        )

    def _finished(self, begun: _Begun) -> Priced:
        parallelism, traits, units, stages, times = begun
        stages, span = self._run(parallelism, stages, times)
        stage_memory = self.group.stage_memory(parallelism, traits)
        update_s, offload_s = self._optimizer_s(parallelism, traits, span, stage_memory)
        tied_s = self.group.tied_s(parallelism, units)
        step_s, step = whole_step(span, stages, tied_s, update_s, offload_s, self.slowest_share)
        if self.ratio != 1.0:
            step_s, step = step_s * self.ratio, {part: seconds * self.ratio for part, seconds in step.items()}
        ranks = self.group.ranks_memory(parallelism, traits, span, stage_memory)
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
        part = share(span.timeline, pipeline_axis(parallelism), self.group.nodes.devices_per_node, self.turns)
        times = [one.scaled(part) for one in times]
        return tuple(one.scaled(part) for one in stages), pipeline_span(parallelism, span.m, times)

    def stage_times(self, parallelism: Parallelism, cuts: Sequence[tuple[int, ...]]) -> list[list[StageTimes]]:
        """Times of each stage of a legal layout, for each cut (the layers of each stage); neither schedule nor memory is computed."""
        units, data = self.group.units(parallelism), self.group.data_parallel(parallelism, self.traits(parallelism))
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
        sends_s = self.group.sends_s(
            neighbours, pipeline_axis(parallelism), message_bytes(parallelism, data.traits, units)
        )
        return stages, beside.times(parallelism, stages, sends_s, sends_s)

    def decided(self, parallelism: Parallelism) -> Parallelism:
        """The layout with the context_parallel_method that its price uses, where the engine has several methods."""
        if not self.group.methods(parallelism):
            return parallelism
        method = self.price(parallelism).parallelism.context_parallel_method
        return parallelism.model_copy(update={"context_parallel_method": method})

    def _stages(self, parallelism: Parallelism, units: Units, data: DataParallel) -> tuple[StageCost, ...]:
        ranges = self.group.ranges(parallelism)
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
            table = self.group.table(list(new.values()), recomputed)
            costs = self.group.stage_costs(units, table, data, recompute, passes_behind=behind)
            made |= zip(new, costs.rows(table), strict=True)
        return tuple(made[key] for key in keys)

    def _beside(
        self, parallelism: Parallelism, units: Units, data: DataParallel, costs: Sequence[StageCost]
    ) -> BesideStages:
        gathers, reductions = list[float](), list[float]()
        if gathers_beside(parallelism, data):
            gathers = gathers_s(units, self.group.stage_table(self.group.ranges(parallelism)), data, self.group.network)
        if share_beside(parallelism.virtual_stages_per_rank, data.traits, data.overlap):
            reductions = reductions_s(parallelism, costs)
        return BesideStages(ranks_of_stages(parallelism), gathers, reductions)

    def _optimizer_s(
        self, parallelism: Parallelism, traits: Traits, span: Makespan, stages: StageMemory
    ) -> tuple[float, float]:
        """Seconds on the slowest rank: (norm, clipping and update with the all-reduce of loss and norm; copies of states from
        and to host memory)."""
        update_s, offload_s = max(self.group.ranks_optimizer_s(parallelism, traits, span, stages), key=sum)
        return update_s + self.group.norm_s(parallelism), offload_s

    def needs(self, parallelism: Parallelism) -> list[float]:
        """Device bytes that each pipeline rank of a legal layout needs, found without running its schedule."""
        traits = self.traits(parallelism)
        span = unrun(parallelism, parallelism.num_micro_batches(self.job))
        stages = self.group.stage_memory(parallelism, traits)
        return self.group.ranks_memory(parallelism, traits, span, stages).total.tolist()

    def activation_bytes(self, priced: Priced) -> memory.Floats:
        """[1, p] Bytes of activations that each pipeline rank can keep and still fit; all replicas are the same."""
        layout = priced.parallelism
        traits = self.traits(layout)
        ranks = self.group.ranks_memory(layout, traits, priced.span, priced.memory)
        return memory.activation_room(ranks, self.group.nodes.device.memory_bytes, priced.span.m)[None]

    def memory_of_places(self, priced: Priced) -> list[memory.PlaceMemory]:
        """Memory that the ranks at each place of the pipeline need; all replicas are the same."""
        layout, device = priced.parallelism, self.group.nodes.device
        traits = self.traits(layout)
        needs, axis = self.group.ranks_memory(layout, traits, priced.span, priced.memory), pipeline_axis(layout)
        return [
            memory.PlaceMemory(
                tuple(place * axis.stride + offset for offset in axis.offsets),
                device.name,
                device.memory_bytes,
                needs.of(place),
            )
            for place in range(priced.span.p)
        ]

    def _forecast(
        self,
        parallelism: Parallelism,
        step_s: float,
        step: dict[str, float],
        rank: int,
        used: memory.RankMemory,
        units: Units,
    ) -> Forecast:
        device, world = self.group.nodes.device, parallelism.world_size
        low_s, high_s = band_s(step_s, step_error(self.group.nodes), centred=self.group.nodes.calibration is not None)
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
