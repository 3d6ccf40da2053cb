"""Lower bounds of step time and memory for every row of the space, from the forecast's own unit costs.

Two levels. Of a whole block, before anything of it is priced: its arithmetic at the fastest that the device computes,
the collectives within a replica, and the one pipeline fill that no schedule avoids. Of each row of a block, from the
block's priced units: its stages cost what the forecast says (``stage_columns``), and its schedule takes at least the
closed form of ``ahp.schedule.bounds``. Memory counts states and the activations kept at one moment near the fullest. So
a row whose bound is above the best time, or above the device, needs no forecast. Tests hold all under the forecast on
rows drawn at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ahp.engines.engine import Traits
from ahp.engines.registry import get
from ahp.forecast import memory
from ahp.forecast.communication import strided_group
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.groups import data_groups, expert_groups, shard_ranks
from ahp.forecast.pricer import num_groups, recompute_of
from ahp.forecast.stage import DataParallel, Recompute, dropped_bytes, made_again
from ahp.forecast.units import Units, axes_of
from ahp.plan import Parallelism
from ahp.schedule.bounds import TimeColumns, in_flight, least_kept, lower_bounds_s, ranks_stages
from ahp.schedule.patterns import SPLIT_BACKWARD, V_SHAPED, stage_ranks
from ahp.schedule.stages import layers_of_stages
from ahp.search.block_bounds import block_bounds_s, block_needs_bytes
from ahp.search.problem import Problem
from ahp.search.space import LOOPED, Pipe, Rows, Space
from ahp.search.stage_columns import BlockStages

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIT_PROBABILITY = 0.95
"""What ``Forecast.fits`` asks for."""

MUCH_BYTES = 10**12
"""So many that what an allocator wastes of them gives its share to twelve digits."""


@dataclass(frozen=True)
class RowBounds:
    """Of every row of one block, in their order."""

    times_s: Floats
    needs_bytes: Floats
    """Of the fullest rank."""


class Bounds:
    """Lower bounds for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.edges = cache(self._edges)
        self.loads = cache(self._loads)
        self.second_rank = cache(self._second_rank)
        self._splits: dict[tuple[int, ...], tuple[list[Parallelism], list[Traits]]] = {}

    def splits(self, space: Space, block: int) -> tuple[list[Parallelism], list[Traits]]:
        """Of each split of a block a layout, and how the engine behaves there; blocks that differ in the micro-batch share them."""
        of, asked = space.blocks, self.problem
        columns = of.tensor, of.sequence_parallel, of.context, of.expert, of.pipeline, of.data
        key = tuple(int(column[block]) for column in columns)
        if key not in self._splits:
            rows, engine = space.rows(block), get(asked.engine.name)
            layouts = [space.layout_of(block, split, rows.pipes[0], "none") for split in rows.splits]
            self._splits[key] = layouts, [engine.traits(asked.job, layout, asked.engine) for layout in layouts]
        return self._splits[key]

    def _edges(self, pipeline: int, virtual: int) -> Ints:
        """The first layer of every stage, and the number of layers after the last."""
        layout = Parallelism(
            pipeline_parallel_degree=pipeline,
            virtual_stages_per_rank=virtual,
            layers_per_stage=self.problem.constraints.layers_per_stage,
        )
        layers = layers_of_stages(layout, self.problem.graph.num_layers, ends=self.problem.stage_ends)
        return np.cumsum([0, *layers])

    def _loads(self, schedule: str, pipeline: int, virtual: int) -> tuple[Ints, Ints, int]:
        """[p] Layers of each rank, [p] layers before its first stage, and the rank that has the head."""
        layers, own = np.diff(self.edges(pipeline, virtual)), ranks_stages(schedule, pipeline, virtual)
        before = np.cumsum(layers[:pipeline]) - layers[:pipeline]
        return layers[own].sum(axis=1), before, int(own[:, -1].argmax())

    def _second_rank(self, pipes: tuple[Pipe, ...], pipeline: int, m: int) -> set[tuple[int, int]]:
        """Layers of the second rank (of a single stage the first), and these times its micro-batches in flight, of each pipe."""
        found, rank = set(), min(1, pipeline - 1)
        for schedule, virtual in pipes:
            own = ranks_stages(schedule, pipeline, virtual)[rank]
            layers = np.diff(self.edges(pipeline, virtual))[own]
            found.add((int(layers.sum()), int(in_flight(schedule, pipeline, virtual, m)[rank] @ layers)))
        return found

    def most_that_fits_bytes(self) -> float:
        """Bytes above which a forecast does not fit: ``forecast.memory.fit_probability`` solved for its argument."""
        sigma = memory.need_error()
        return self.problem.capacity_bytes * float(np.exp(-NormalDist().inv_cdf(FIT_PROBABILITY) * sigma))

    def block_s(self, space: Space, block: int) -> float:
        """Seconds that every row of one block that fits takes at least; infinite where none does. Prices the units."""
        return _Block(self, space, block).bound_s(self.most_that_fits_bytes())

    def needs_bytes(self, space: Space, block: int) -> Floats:
        """Bytes that every row of a block needs at least on its fullest rank."""
        return _Block(self, space, block).needs_bytes().reshape(-1)

    def rows(self, space: Space, block: int, most_bytes: float) -> RowBounds:
        """Bounds of every row of a block; one that needs more than ``most_bytes`` takes infinitely long."""
        return _Block(self, space, block).bounds(most_bytes)

    def blocks_s(self, space: Space) -> Floats:
        """Seconds that every row of each block takes at least."""
        return block_bounds_s(self.problem, space.blocks)

    def blocks_bytes(self, space: Space) -> Floats:
        """Bytes that every row of each block needs at least."""
        return block_needs_bytes(self.problem, space)


class _Block:
    """One block with its units, its rows, and what they share."""

    def __init__(self, bounds: Bounds, space: Space, block: int) -> None:
        asked = bounds.problem
        self.of, self.asked = bounds, asked
        self.rows: Rows = space.rows(block)
        self.m = int(space.blocks.micro_batches[block])
        self.layouts, self.traits = bounds.splits(space, block)
        size = int(space.blocks.micro_batch[block])
        self.any = self.layouts[0].model_copy(update={"micro_batch_size": size})
        self.p = self.any.pipeline_parallel_degree
        self.pricer = self.asked.pricer
        self.nodes, self.network = self.pricer.nodes, self.pricer.network
        self.bytes_per_s = self.pricer.unit_pricer.rates.bytes_per_s
        axes = axes_of(self.any, self.nodes.devices_per_node)
        self.units: Units = self.pricer.unit_pricer.units(self.any.micro_batch_size, axes, self.traits[0])
        kinds = [self.any.model_copy(update={"activation_checkpoint": kind}) for kind in self.rows.recompute]
        self.recompute: list[Recompute] = [recompute_of(layout, self.traits[0], self.units) for layout in kinds]
        self._beside = cache(self._beside_activations)
        self._kept = cache(lambda virtual: self.stages.kept_bytes(self.edges(virtual)))
        self._shares = cache(self._updated)
        self._least_states = cache(self._smallest_states)
        self.stages = BlockStages(self.units, self.recompute, self._data(self.any, self.traits[0]))

    def bound_s(self, most_bytes: float) -> float:
        """Of all rows that fit, as if every layer were the cheapest one and replicas had nothing to send each other."""
        kinds = [kind for kind in range(len(self.recompute)) if self._least_needed(kind) <= most_bytes]
        if not kinds:
            return float("inf")
        forward, backward, head = self.stages.least_s(kinds)
        found = float("inf")
        for schedule, virtual in {(self._shape(pipe), pipe.virtual) for pipe in self.rows.pipes}:
            layers, before, last = self.of.loads(schedule, self.p, virtual)
            # Where weight gradients wait, they may fill the time in which gradients drain from the pipeline.
            drain_s = 0.0 if schedule in SPLIT_BACKWARD else before * backward
            ranks_s = before * forward + self.m * layers * (forward + backward) + drain_s
            ranks_s[last] += self.m * head
            found = min(found, float(ranks_s.max()))
        return found * (1.0 + self.pricer.slowest_share)

    def _shape(self, pipe: Pipe) -> str:
        """A schedule that is like this one in where its stages lie, and in whether it splits the backward pass."""
        if pipe.schedule in V_SHAPED or self.p == 1:
            return V_SHAPED[0] if self.p > 1 else "1F1B"
        return LOOPED[pipe.schedule in SPLIT_BACKWARD]

    def _least_needed(self, kind: int) -> float:
        """Bytes that the second rank (of a single stage the first) needs at least with one kind of recompute."""
        parameters, experts, kept = self.stages.least_layer(kind)
        least = float("inf")
        pipes = tuple(Pipe(self._name(pipe), pipe.virtual) for pipe in self.rows.pipes)
        for layers, held in self.of.second_rank(pipes, self.p, self.m):
            allocated, gradients = self._least_states(int(layers * parameters), int(layers * experts))
            least = min(least, allocated + max(held * kept - gradients, 0.0))
        return float(self._totals(np.array(least)).min())

    def _smallest_states(self, total: int, experts: int) -> tuple[int, int]:
        """``_states`` of a rank with so many parameters: the least of all splits, and the most of gradients."""
        states = self._states(memory.RankWeights(total, 0, 0, experts=experts))
        return min(allocated for allocated, _ in states), max(gradients for _, gradients in states)

    def _states(self, weights: memory.RankWeights) -> list[tuple[int, int]]:
        """By split: bytes that do not depend on the schedule, and of them the gradients that activations may replace."""
        found = []
        for layout, traits in zip(self.layouts, self.traits, strict=True):
            parts = memory.state_bytes(
                weights,
                traits,
                shards=shard_ranks(layout),
                micro_batches=self.m,
                expert_ranks=layout.expert_parallel_degree,
            )
            # With one micro-batch gradients grow as activations go.
            found.append((sum(parts.values()), parts["gradients"] if self.m == 1 else 0))
        return found

    def _name(self, pipe: Pipe) -> str:
        return pipe.schedule if self.p > 1 else "1F1B"

    def bounds(self, most_bytes: float) -> RowBounds:
        """Of every row; rows that need more than ``most_bytes`` take infinitely long."""
        times = np.full(self.rows.shape, np.inf)
        needs = self.needs_bytes()
        fits = needs <= most_bytes
        by_traits: dict[Traits, list[int]] = {}
        for index, of in enumerate(self.traits):
            by_traits.setdefault(of, []).append(index)
        columns = {of: self._stages_with(of, at[0]) for of, at in by_traits.items()}
        for virtual in dict.fromkeys(pipe.virtual for pipe in self.rows.pipes):
            pipes = [i for i, pipe in enumerate(self.rows.pipes) if pipe.virtual == virtual and fits[:, i].any()]
            for of, alike in by_traits.items():
                splits = [i for i in alike if fits[i][pipes].any()]
                if splits:
                    self._time_rows(times, columns[of], splits, pipes, virtual)
        for index, pipe in enumerate(self.rows.pipes):
            times[:, index] += self._optimizer_s(pipe)[:, None]
        slowest = 1.0 + self.pricer.slowest_share
        times = np.where(fits, (times + self.pricer.tied_s(self.any, self.units)) * slowest, np.inf)
        return RowBounds(times.reshape(-1), needs.reshape(-1))

    def needs_bytes(self) -> Floats:
        """Of every row, in their shape."""
        return np.stack([self._needs(pipe) for pipe in self.rows.pipes], axis=1)

    def _stages_with(self, traits: Traits, split: int) -> BlockStages:
        if traits == self.traits[0]:
            return self.stages
        return BlockStages(self.units, self.recompute, self._data(self.layouts[split], traits))

    def _time_rows(self, times: Floats, stages: BlockStages, splits: list[int], pipes: list[int], virtual: int) -> None:
        """Write into ``times`` what the schedules of some rows take at least."""
        edges = self.edges(virtual)
        data = [self._data(self.layouts[i], self.traits[i]) for i in splits]
        passes = stages.passes(data, edges, self.network, self.bytes_per_s)
        shape = (len(splits), len(self.recompute), self.p * virtual)
        forward, backward, first, last = (
            np.broadcast_to(part, shape).reshape(-1, shape[2])
            for part in (passes.forward, passes.backward, passes.first_forward, passes.last_backward)
        )
        weight_s = self.stages.weight_gradient_s(edges)[None]
        for index in pipes:
            sends = self._sends(self.rows.pipes[index], data[0].traits)
            columns = TimeColumns(forward, backward, backward - weight_s, weight_s, *sends, first, last)
            bound = lower_bounds_s(self._name(self.rows.pipes[index]), self.p, virtual, self.m, columns)
            times[splits, index] = bound.reshape(shape[:2])

    def _data(self, layout: Parallelism, traits: Traits) -> DataParallel:
        per_node = self.nodes.devices_per_node
        shard, replicate = data_groups(layout, per_node)
        on_cpu = is_cpu(self.nodes.device)
        return DataParallel(
            shard=shard,
            replicate=replicate,
            experts=expert_groups(layout, per_node),
            traits=traits,
            micro_batches=self.m,
            overlap=0.0 if on_cpu else 1.0,
            operator_s=self.nodes.device.kernel_launch_s,
            host_is_device=on_cpu,
        )

    def edges(self, virtual: int) -> Ints:
        return self.of.edges(self.p, virtual)

    def _holders(self, pipe: Pipe) -> Ints:
        """[S] The pipeline rank of each stage."""
        return np.array(stage_ranks(pipe.schedule, self.p, pipe.virtual) if self.p > 1 else (0,))

    def _sends(self, pipe: Pipe, traits: Traits) -> tuple[Floats, Floats]:
        """[1, S] Seconds on the way forward and back, as the forecast has them."""
        holders = self._holders(pipe).tolist()
        sent = cache(lambda a, b: self.pricer.send_s(self.any, traits, a, b, self.units))
        between = np.array([sent(a, b) for a, b in pairwise(holders)])
        return np.append(between, 0.0)[None], np.append(0.0, between)[None]

    def _optimizer_s(self, pipe: Pipe) -> Floats:
        """[J] Clipping, AdamW and the one collective of loss and norm."""
        return self._shares(pipe.virtual, pipe.schedule in V_SHAPED)

    def _updated(self, virtual: int, v_shaped: bool) -> Floats:
        held, experts = self._held(Pipe(V_SHAPED[0] if v_shaped else "Interleaved1F1B", virtual))
        world = strided_group(self.any.world_size, 1, self.nodes.devices_per_node)
        norm_s = self.network.time_s("all_reduce", 16, world)
        found = []
        for layout, traits in zip(self.layouts, self.traits, strict=True):
            shards = shard_ranks(layout)
            per_expert = max(1.0, shards / layout.expert_parallel_degree)
            updated = float(((held - experts) / shards + experts / per_expert).max())
            found.append(updated * self.pricer.optimizer_bytes(traits) / self.bytes_per_s + norm_s)
        return np.array(found)

    def _held(self, pipe: Pipe) -> tuple[Floats, Floats]:
        """[p] Parameters of each rank, and of them those of experts."""
        edges, holders = self.edges(pipe.virtual), self._holders(pipe)
        blocks, experts = self.stages.in_blocks(edges)
        total = blocks + self.stages.outside(edges)
        return np.bincount(holders, total, self.p).astype(float), np.bincount(holders, experts, self.p).astype(float)

    def _needs(self, pipe: Pipe) -> Floats:
        """[J, R] Bytes of the rank that needs the most, of the first two and the last."""
        held = least_kept(self._name(pipe), self.p, pipe.virtual, self.m, self._kept(pipe.virtual))
        most = np.zeros((len(self.layouts), len(self.recompute)))
        for rank, states, gradients, beside in self._beside(pipe.virtual, pipe.schedule in V_SHAPED):
            allocated = states[:, None] + np.maximum(held[:, rank] - gradients[:, None], 0.0) + beside
            most = np.maximum(most, allocated)
        return self._totals(most)

    def _beside_activations(self, virtual: int, v_shaped: bool) -> list[tuple[int, Floats, Floats, Floats]]:
        """By rank: states and gradients of each split [J], and what else lies beside the activations [R]."""
        edges, found = self.edges(virtual), []
        holders = self._holders(Pipe(V_SHAPED[0] if v_shaped else "Interleaved1F1B", virtual))
        num_stages = len(holders)
        for rank in sorted({0, min(1, self.p - 1), self.p - 1}):
            own = np.flatnonzero(holders == rank)
            last = num_stages - 1 in own
            received = sum((stage > 0) + (stage < num_stages - 1) for stage in own) if self.p > 1 else 0
            buffers = received * (self.m if self.traits[0].torch_pipeline else 1) * self.units.hidden_bytes
            temporary = np.array([self._temporary(kind, own, edges, last) for kind in range(len(self.recompute))])
            states = np.array(self._states(self._weights(own, edges, last)), dtype=float)
            found.append((rank, states[:, 0], states[:, 1], temporary + buffers))
        return found

    def _weights(self, own: Ints, edges: Ints, last: bool) -> memory.RankWeights:
        """As the forecast counts them; the largest block is the least that it can be."""
        blocks, experts = self.stages.in_blocks(edges)
        outside = self.stages.outside(edges)
        sizes = [unit.parameters for unit in self.units.blocks]
        any_layers = int(np.diff(edges)[own].sum()) > 0
        head = self.units.head.parameters + self.units.tied_parameters if last else 0
        return memory.RankWeights(
            total=int((blocks + outside)[own].sum()),
            largest_block=min(sizes, default=0) if any_layers else 0,
            outside_blocks=int(outside[own].sum()),
            head=head,
            experts=int(experts[own].sum()),
            shapes=min((unit.shapes for unit in self.units.blocks), default=0) if any_layers else 0,
        )

    def _temporary(self, kind: int, own: Ints, edges: Ints, last: bool) -> float:
        """Bytes at the peak of one backward pass beyond what is kept, at least."""
        recompute = self.recompute[kind]
        needs = [
            u.memory.backward_extra + made_again(u, recompute, dropped_bytes(u, self.units, recompute))
            for u in self.units.blocks
        ]
        layers = np.diff(edges)
        least, head = min(needs, default=0), self.units.head.memory
        found = 0.0
        for stage in own:
            at_end = last and stage == len(layers) - 1
            in_block = least - (head.saved if at_end else 0) if layers[stage] else 0
            found = max(found, in_block, max(head.forward_extra, head.backward_extra) if at_end else 0)
        return found

    @cached_property
    def _outside(self) -> tuple[Floats, Floats]:
        """[J, 1] Bytes that lie outside the allocator, and bytes that it holds for each one allocated."""

        def total(layout: Parallelism, allocated_bytes: int) -> int:
            parts = {"all": allocated_bytes}
            return memory.rank_memory(parts, self.nodes.device, num_groups(layout)).total

        none, much = (
            np.array([[total(layout, amount)] for layout in self.layouts], dtype=float) for amount in (0, MUCH_BYTES)
        )
        return none, (much - none) / MUCH_BYTES

    def _totals(self, allocated: Floats) -> Floats:
        """[J, R] What a device must have for so many bytes in tensors, at least."""
        outside, each = self._outside
        return outside + np.floor(allocated) * each - 1.0  # a byte for the rounding
