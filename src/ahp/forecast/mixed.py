"""Prices layouts on a cluster of several kinds of devices: every cell with the tables of its own device.

Each group of nodes has a ``GroupPricer``, which prices the stages of the group's cells; gradients are summed over all
cells of a stage. Each replica's pipeline is simulated with its own stage times and its own number of micro-batches; the
slowest replica and the slowest update after it make the step. What replicas share is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np

from ahp.cluster.cells import Cell, Placement, place
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
from ahp.forecast.axes import ALONE
from ahp.forecast.beside_stages import BesideStages, gathers_beside, gathers_s, reductions_s, share_beside
from ahp.forecast.constants import margins
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.group import CollectiveKind, Group, strided_group
from ahp.forecast.group_pricer import LOSS_AND_NORM_BYTES, GroupPricer
from ahp.forecast.groups import replica_members
from ahp.forecast.mixed_network import MixedNetwork
from ahp.forecast.priced import LayoutPricer, Priced, Replica
from ahp.forecast.stage import StageCost
from ahp.forecast.stage_memory import StageMemory
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism
from ahp.schedule.makespan import Makespan
from ahp.schedule.orders import order_lines, ranks_of_stages
from ahp.schedule.simulate import StageTimes

OF_CELLS = ("stages", "layers_per_stage", "micro_batches_per_replica", "recomputed_layers_per_stage")
"""Fields of a layout that say which cell computes what: the cost of a stage depends on the degrees, not on these fields."""


_Kind = tuple[str, tuple[int, int]]
"""The kind of a cell: its group of devices, and its shard and tensor degree."""


@dataclass(frozen=True)
class _Layout:
    """One layout, and what its replicas share."""

    parallelism: Parallelism
    own: tuple[Parallelism, ...]
    """The layout as each pipeline rank has it, with the width of its own stages."""
    traits: tuple[Traits, ...]
    """The engine's traits for each pipeline rank."""
    widths: tuple[tuple[int, int], ...]
    """Shard and tensor degree of each pipeline rank."""
    placement: Placement
    stage_rank: tuple[int, ...]
    """The pipeline rank that holds each stage."""
    replicated: tuple[Group, ...]
    """For each pipeline rank, the ranks of all replicas that hold the same weights."""
    cost: Callable[[int, str, int, int | None], StageCost]
    """The cost of a stage: its number, the group of its devices, the micro-batches of its replica, and its recomputed layers."""

    def kinds(self, cells: Sequence[Cell]) -> list[_Kind]:
        """The kind (devices and width) of each pipeline rank of a replica: stages cost the same on cells of one kind."""
        return [(cell.group, width) for cell, width in zip(cells, self.widths, strict=True)]

    def each_kind(self, kinds: Sequence[_Kind]) -> dict[_Kind, tuple[Parallelism, Traits]]:
        """The layout and the traits of pipeline ranks, keyed by their kind."""
        return dict(zip(kinds, zip(self.own, self.traits, strict=True), strict=True))


class MixedPricer(LayoutPricer):
    """Forecasts for one model, mixed cluster, job and engine; ``Pricer`` is the same for a plain cluster."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, job: Job, choice: EngineChoice) -> None:
        super().__init__(graph, cluster, job, choice)
        self.groups = {
            group.name: GroupPricer(graph, group, self.job, choice, in_cells=True) for group in cluster.groups
        }
        self.network = MixedNetwork(cluster)
        self._stage_costs: dict[tuple[object, ...], StageCost] = {}
        self.slowest_share = self._slowest_share(self.groups, cluster.num_devices)
        """A layout that leaves devices idle counts only those it uses."""

    def methods(self, parallelism: Parallelism) -> list[ContextWay]:
        any_group = next(iter(self.groups.values()))
        first, *others = map(any_group.methods, parallelism.layouts_of_ranks)
        return [way for way in first if all(way in of for of in others)]

    def cells_fit(self, parallelism: Parallelism) -> Callable[[int, Sequence[int]], list[bool]]:
        """A function of a replica and the recomputed layers of each stage: whether each cell fits, without running the schedule.

        Raises like ``price``.
        """
        self.legal_traits(parallelism)
        layout = self._layout(parallelism)

        def fits(replica: int, recomputed: Sequence[int]) -> list[bool]:
            span = unrun(parallelism, parallelism.micro_batches(self.job)[replica])
            cells = layout.placement.cells[replica]
            needs = self._memory(layout, cells, span, self._stage_memory(layout, replica, recomputed))
            return [
                memory.fit_probability(float(need.total), self._capacity(cell.group)) >= memory.FIT_PROBABILITY
                for need, cell in zip(needs, cells, strict=True)
            ]

        return fits

    def stage_cost(
        self,
        parallelism: Parallelism,
        group: str,
        stage: tuple[int, int, bool, bool],
        *,
        micro_batches: int,
        replicate: Group = ALONE,
        experts: Group = ALONE,
        recomputed_layers: int | None = None,
        passes_behind: int = 0,
    ) -> StageCost:
        """The cost of one stage on a group's devices; the ``OF_CELLS`` fields of ``parallelism`` do not matter.

        ``stage``: as for ``StageTable.of``. ``recomputed_layers``: None = all, if any are. ``micro_batches``: of the stage's replica.
        ``replicate``, ``experts``: the ranks that sum its gradients, and its experts' (``network.replicas``); ``ALONE`` takes no time.
        """
        degrees = parallelism.model_copy(update=dict.fromkeys(OF_CELLS))
        start, end, *ends = stage
        kinds = tuple(self.graph.layers[start:end])
        key = (degrees, group, kinds, *ends, micro_batches, replicate, experts, recomputed_layers, passes_behind)
        if key not in self._stage_costs:
            own, traits = self.groups[group], self.traits(parallelism)
            units, data = own.units(parallelism), own.data_parallel(parallelism, traits)
            data = replace(data, replicate=replicate, experts=(data.experts[0], experts), micro_batches=micro_batches)
            recompute = recompute_of(parallelism.activation_checkpoint, traits, units)
            some = None if recomputed_layers is None else [recomputed_layers]
            table = own.table([stage], some)
            network = self.network.times(own.network)
            costs = own.stage_costs(units, table, data, recompute, network, passes_behind)
            [self._stage_costs[key]] = costs.rows(table)
        return self._stage_costs[key]

    def _price(self, parallelism: Parallelism) -> Priced:
        self.legal_traits(parallelism)
        layout = self._layout(parallelism)
        replicas = self._replicas(layout)
        slowest = max(replicas, key=lambda replica: replica.span.makespan_s)
        update_s, offload_s = self._optimizer_s(layout, replicas)
        tied_s = max(self._tied_s(layout, replica.cells) for replica in replicas)
        share = self._slowest_share(layout.placement.used, parallelism.world_size)
        step_s, step = whole_step(slowest.span, slowest.stages, tied_s, update_s, offload_s, share)
        return Priced(
            self._forecast(layout, step_s, step, replicas),
            parallelism, slowest.span, slowest.stages, slowest.memory, replicas=tuple(replicas),
        )  # fmt: skip

    def _layout(self, parallelism: Parallelism) -> _Layout:
        placement = place(self.cluster, parallelism)
        ranges = next(iter(self.groups.values())).ranges(parallelism)
        stage_rank = ranks_of_stages(parallelism)
        of_width = {each.widths[0]: (each, self.traits(each)) for each in parallelism.layouts_of_ranks}
        own, traits = zip(*(of_width[width] for width in parallelism.widths), strict=True)
        members = {width: replica_members(each, of.experts.folded) for width, (each, of) in of_width.items()}
        sums = [
            tuple(self.network.replicas(column, *some) for some in members[width])
            for column, width in zip(zip(*placement.cells, strict=True), parallelism.widths, strict=True)
        ]

        def cost(stage: int, group: str, micro_batches: int, recomputed_layers: int | None) -> StageCost:
            rank = stage_rank[stage]
            replicate, of_experts = sums[rank]
            layers, last = ranges[stage], len(ranges) - 1
            return self.stage_cost(
                own[rank], group, (layers.start, layers.stop, stage == 0, stage == last),
                micro_batches=micro_batches, replicate=replicate, experts=of_experts, recomputed_layers=recomputed_layers,
                passes_behind=passes_behind(parallelism, stage) if traits[rank].reduce.overlap else 0,
            )  # fmt: skip

        replicated = tuple(replicate for replicate, _ in sums)
        return _Layout(parallelism, own, traits, parallelism.widths, placement, stage_rank, replicated, cache(cost))

    def _replicas(self, layout: _Layout) -> list[Replica]:
        """The pipeline of each replica; replicas with the same kinds of cells and the same work are simulated once."""
        made: dict[tuple[object, ...], Replica] = {}
        replicas = []
        p = layout.parallelism
        for replica, (cells, count) in enumerate(zip(layout.placement.cells, p.micro_batches(self.job), strict=True)):
            on_node = (one.shares_node(other) for one, other in pairwise(cells[rank] for rank in layout.stage_rank))
            own = p.recomputed_layers(replica), order_lines(p, replica)
            key = (count, *own, *(cell.group for cell in cells), *on_node)
            if key not in made:
                stages, times = self._timed(layout, replica)
                span = pipeline_span(p, count, times, replica)
                made[key] = Replica(cells, stages, span, self._stage_memory(layout, replica))
            replicas.append(replace(made[key], cells=cells))
        return replicas

    def _timed(self, layout: _Layout, replica: int) -> tuple[tuple[StageCost, ...], list[StageTimes]]:
        """A replica's stage costs that count only what a stage waits for, and its stage times that also have the collectives overlapped with it."""
        cells, costs = layout.placement.cells[replica], self._stages(layout, replica)
        beside = self._beside(layout, cells, costs)
        stages = beside.stages(costs)
        sends = [self._send_s(layout, cells, one, other) for one, other in pairwise(layout.stage_rank)]
        back = sends
        if len(set(layout.widths)) > 1:
            back = [self._send_s(layout, cells, other, one) for one, other in pairwise(layout.stage_rank)]
        return stages, beside.times(layout.parallelism, stages, sends, back)

    def _stages(self, layout: _Layout, replica: int, recomputed: Sequence[int] | None = None) -> tuple[StageCost, ...]:
        """``recomputed``: recomputed layers of each stage; None = as in the layout."""
        cells, count = layout.placement.cells[replica], layout.parallelism.micro_batches(self.job)[replica]
        some = recomputed or layout.parallelism.recomputed_layers(replica) or (None,) * len(layout.stage_rank)
        return tuple(
            layout.cost(stage, cells[rank].group, count, some[stage]) for stage, rank in enumerate(layout.stage_rank)
        )

    def _beside(self, layout: _Layout, cells: Sequence[Cell], costs: Sequence[StageCost]) -> BesideStages:
        """The collectives of weights that overlap with computation, where those of all cells do."""
        groups, last = [self.groups[cell.group] for cell in cells], len(layout.stage_rank) - 1
        data = [
            of.data_parallel(*own) for of, own in zip(groups, zip(layout.own, layout.traits, strict=True), strict=True)
        ]
        gathers, reductions = list[float](), list[float]()
        if all(map(gathers_beside, layout.own, data)):
            for stage, rank in enumerate(layout.stage_rank):
                group, p = groups[rank], layout.own[rank]
                layers = group.ranges(p)[stage]
                table = group.table([(layers.start, layers.stop, stage == 0, stage == last)])
                gathers += gathers_s(group.units(p), table, data[rank], self.network.times(group.network))
        if all(share_beside(layout.parallelism.virtual_stages_per_rank, of.traits, of.overlap) for of in data):
            reductions = reductions_s(layout.parallelism, costs)
        return BesideStages(layout.stage_rank, gathers, reductions)

    def _stage_memory(self, layout: _Layout, replica: int, recomputed: Sequence[int] | None = None) -> StageMemory:
        """Memory of each stage of a replica on the devices of its cell."""
        cells, parallelism = layout.placement.cells[replica], layout.parallelism
        some = recomputed or parallelism.recomputed_layers(replica)
        kinds = layout.kinds(cells)
        each = {
            kind: self.groups[kind[0]].stage_memory(own, traits, some)
            for kind, (own, traits) in layout.each_kind(kinds).items()
        }
        numbers = {kind: number for number, kind in enumerate(each)}
        return StageMemory.on_devices([*each.values()], [numbers[kinds[rank]] for rank in layout.stage_rank])

    def _send_s(self, layout: _Layout, cells: Sequence[Cell], one: int, other: int) -> float:
        """Seconds to send one micro-batch's hidden states, or their gradient, from the cell of one pipeline rank to that of another."""
        if one == other:
            return 0.0
        if layout.widths[one] != layout.widths[other]:
            return self._laid_anew_s(layout, cells, one, other)
        sent = message_bytes(layout.own[one], layout.traits[one], self.groups[cells[one].group].units(layout.own[one]))
        return self._between_s("send_recv", sent, cells[one], cells[other])

    def _laid_anew_s(self, layout: _Layout, cells: Sequence[Cell], one: int, other: int) -> float:
        """``_send_s`` between cells of different width (runtime/pipeline/borders.py): every rank sends or receives its share, and
        receiving tensor ranks that need the whole hidden states all-gather them."""
        own, traits, context = layout.own[one], layout.traits[one], layout.parallelism.context_parallel_degree
        shard, tensor = layout.widths[one]
        ours = message_bytes(own, traits, self.groups[cells[one].group].units(own))
        whole = ours * context * shard * (tensor if own.enable_sequence_parallel else 1)
        network = self.groups[cells[one].group].network
        sent_s = self.network.handed_s(network, cells[one], cells[other], whole)
        theirs, (shard, tensor) = layout.own[other], layout.widths[other]
        if tensor == 1 or theirs.enable_sequence_parallel:
            return sent_s
        nodes = self.groups[cells[other].group]
        group = strided_group(tensor, 1, nodes.nodes.devices_per_node)
        return sent_s + nodes.network.time_s("all_gather", whole / context / shard, group)

    def _tied_s(self, layout: _Layout, cells: Sequence[Cell]) -> float:
        """Seconds to all-reduce the gradient of weights that a replica's first and last stage share: in parts between pairs of ranks
        where both have the same width, else whole over all their ranks (runtime/shard/ownership.py)."""
        first, last = layout.stage_rank[0], layout.stage_rank[-1]
        group = self.groups[cells[first].group]
        num_bytes = group.tied_bytes(group.units(layout.own[first]))
        if len(cells) == 1 or num_bytes == 0:
            return 0.0
        if layout.widths[first] == layout.widths[last]:
            return self._between_s("all_reduce", num_bytes, cells[0], cells[-1])
        times = self.network.times(group.network)
        whole = num_bytes * layout.widths[first][1]
        return times.time_s("all_reduce", whole, self.network.together((cells[first], cells[last])))

    def _between_s(self, kind: CollectiveKind, num_bytes: float, one: Cell, other: Cell) -> float:
        times = self.network.times(self.groups[one.group].network)
        return times.time_s(kind, num_bytes, self.network.pair(one, other))

    def _optimizer_s(self, layout: _Layout, replicas: list[Replica]) -> tuple[float, float]:
        """Seconds on the slowest device: (update with the all-reduce of loss and norm; copies of states from and to host
        memory)."""
        each: list[tuple[float, float]] = []
        for replica in _distinct(replicas):
            kinds = layout.kinds(replica.cells)
            on = {}
            for kind, (own, traits) in layout.each_kind(kinds).items():
                group = self.groups[kind[0]]
                here = [of if its == kind else ALONE for of, its in zip(layout.replicated, kinds, strict=True)]
                between = self.network.times(group.network), here
                on[kind] = group.ranks_optimizer_s(own, traits, replica.span, replica.memory, between)
            each += [on[kind][rank] for rank, kind in enumerate(kinds)]
        update_s, offload_s = max(each, key=sum)
        times = self.network.times(self.groups[replicas[0].cells[0].group].network)
        norm_s = times.time_s("all_reduce", LOSS_AND_NORM_BYTES, self.network.world(layout.placement))
        return update_s + norm_s, offload_s

    def _slowest_share(self, names: Iterable[str], num_ranks: int) -> float:
        on_cpu = any(is_cpu(self.groups[name].nodes.device) for name in names)
        return 0.0 if on_cpu else slowest_share(num_ranks)

    def _memory(
        self, layout: _Layout, cells: Sequence[Cell], span: Makespan, stages: StageMemory
    ) -> list[memory.RankMemory]:
        """Memory that each cell of a replica needs on one of its devices."""
        return [ranks.of(rank) for rank, ranks in enumerate(self._ranks_memory(layout, cells, span, stages))]

    def _ranks_memory(
        self, layout: _Layout, cells: Sequence[Cell], span: Makespan, stages: StageMemory
    ) -> list[memory.RanksMemory]:
        """For each pipeline rank, the memory that all pipeline ranks would need on its kind of device and at its width."""
        kinds = layout.kinds(cells)
        needs = {
            kind: self.groups[kind[0]].ranks_memory(own, traits, span, stages)
            for kind, (own, traits) in layout.each_kind(kinds).items()
        }
        return [needs[kind] for kind in kinds]

    def activation_bytes(self, priced: Priced) -> memory.Floats:
        """[R, p] Bytes of activations that each pipeline rank of each replica can keep and still fit."""
        layout = self._layout(priced.parallelism)
        rooms = [
            memory.activation_room(needs, self._capacity(cell.group), replica.span.m)[rank]
            for replica in priced.replicas
            for rank, (cell, needs) in enumerate(
                zip(replica.cells, self._ranks_memory(layout, replica.cells, replica.span, replica.memory), strict=True)
            )
        ]
        return np.array(rooms).reshape(len(priced.replicas), -1)

    def memory_of_places(self, priced: Priced) -> list[memory.PlaceMemory]:
        """Memory that the ranks of each cell need; the ranks at one place of replicas of one kind are taken together."""
        layout = self._layout(priced.parallelism)
        alike: dict[tuple[object, ...], list[Replica]] = {}
        for replica in priced.replicas:
            alike.setdefault(_kind(replica), []).append(replica)
        found = []
        for replicas in alike.values():
            first = replicas[0]
            needs = self._memory(layout, first.cells, first.span, first.memory)
            for rank, (cell, used) in enumerate(zip(first.cells, needs, strict=True)):
                own = [replica.cells[rank] for replica in replicas]
                ranks = tuple(one.first_rank + offset for one in own for offset in range(one.width))
                device = self.groups[cell.group].nodes.device
                found.append(memory.PlaceMemory(ranks, device.name, device.memory_bytes, used))
        return found

    def _fullest(self, layout: _Layout, replicas: list[Replica]) -> tuple[int, Cell, memory.RankMemory]:
        """The pipeline rank and the cell whose devices are the most likely to run out of memory, and the memory it needs."""
        cells = [
            (rank, cell, used)
            for replica in _distinct(replicas)
            for rank, (cell, used) in enumerate(
                zip(replica.cells, self._memory(layout, replica.cells, replica.span, replica.memory), strict=True)
            )
        ]
        # Among equally full cells, take the first in the order of the mesh.
        return max(cells, key=lambda c: (c[2].total / self._capacity(c[1].group), -c[0]))

    def _capacity(self, group: str) -> int:
        return self.groups[group].nodes.device.memory_bytes

    def _forecast(self, layout: _Layout, step_s: float, step: dict[str, float], replicas: list[Replica]) -> Forecast:
        world = layout.parallelism.world_size
        rank, cell, used = self._fullest(layout, replicas)
        own = layout.own[rank]
        peaks = {name: self.groups[name].nodes.device.peak(self.job.precision) for name in layout.placement.used}
        all_flops = sum(count * peaks[name] for name, count in layout.placement.used.items())
        flops = step_flops(self.job, own, self.groups[cell.group].units(own))
        low_s, high_s = band_s(step_s, self._step_error(layout.placement))
        probability = memory.fit_probability(used.total, self._capacity(cell.group))
        return Forecast(
            step_time_s=step_s,
            step_time_low_s=low_s,
            step_time_high_s=high_s,
            tokens_per_s_per_device=self.job.tokens_per_step / (step_s * world),
            mfu=flops / (step_s * all_flops),
            mfu_peak=f"{self._peak_words(layout.placement, peaks)}; {flop_convention(self.job)}",
            memory_allocated_bytes=used.allocated,
            memory_reserved_bytes=used.reserved,
            fit_probability=probability,
            fits=probability >= memory.FIT_PROBABILITY,
            step=step,
            memory=used.parts,
            fullest_rank=cell.first_rank,
        )

    def _peak_words(self, placement: Placement, peaks: dict[str, float]) -> str:
        devices = [
            f"{count} x {self.groups[name].nodes.device.name} at {peaks[name] / 1e12:.4g}"
            for name, count in placement.used.items()
        ]
        return f"{', '.join(devices)} TFLOP/s, dense {self.job.precision} peaks"

    def _step_error(self, placement: Placement) -> float:
        """Standard error of the log of the step time: the worst group's, combined with that of mixing where devices differ."""
        used = [self.groups[name].nodes for name in placement.used]
        alone = max(step_error(nodes) for nodes in used)
        mixes = len({nodes.device.name for nodes in used}) > 1
        return math.hypot(alone, margins.value("step_error_mixed")) if mixes else alone


def _distinct(replicas: list[Replica]) -> list[Replica]:
    """One replica of each kind: equal groups, equal micro-batches, and equal stages."""
    kinds = {_kind(replica): replica for replica in reversed(replicas)}
    return list(reversed(kinds.values()))


def _kind(replica: Replica) -> tuple[object, ...]:
    return (replica.span.m, *(cell.group for cell in replica.cells), *replica.stages)
