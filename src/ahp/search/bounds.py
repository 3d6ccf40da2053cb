"""Lower bounds of step time and memory for every row of the space, from the forecast's own unit costs.

The time of a row is at least, for each pipeline rank: what must run before its first action, its own work on every
micro-batch, and what must follow its last. Collectives that may hide count only with what they take from the computation
that hides them. Memory counts states and kept activations, no temporaries. So a row whose bound is above the best time,
or above the device, needs no forecast. A test holds both under the forecast on rows drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ahp.engines.engine import Traits
from ahp.engines.registry import get
from ahp.forecast import memory
from ahp.forecast.communication import Network, strided_group
from ahp.forecast.compute import Work
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.pricer import slowest_share
from ahp.forecast.stage import DataParallel, Weights
from ahp.forecast.units import Unit, UnitPricer, Units, axes_of
from ahp.plan import Parallelism
from ahp.schedule.patterns import GENERATED
from ahp.schedule.stages import layers_of_stages
from ahp.search.problem import Problem
from ahp.search.space import Mask, Space

Floats = NDArray[np.float64]

FIT_PROBABILITY = 0.95
"""What ``Forecast.fits`` asks for."""


@dataclass(frozen=True)
class PerRank:
    """Sums over the layers of each pipeline rank, the embedding with the first and the head with the last."""

    device_s: Floats
    """Forward and backward of one micro-batch, with collectives."""
    host_s: Floats
    """The same of the host that launches it; 0 on a CPU, where operators hold it."""
    fill_s: Floats
    """Forward of the stages before the rank's first: nothing can start earlier."""
    drain_s: Floats
    """Backward of the same stages: nothing can end earlier after the rank's last action."""
    parameters: Floats
    kept_bytes: Floats
    """Activations of one micro-batch over all stages of the rank."""
    least_kept_bytes: Floats
    """Of the stage of the rank that keeps the least."""


@dataclass(frozen=True)
class RunningSum:
    """A figure of every layer, summed from the first on, so that the sum over a stage is one difference."""

    whole: Floats
    first: float
    """Of the embedding, which the first stage has besides."""
    last: float
    """Of the head."""

    @classmethod
    def of(cls, layers: Floats, first: float, last: float) -> RunningSum:
        return cls(np.concatenate([[0.0], np.cumsum(layers)]), first, last)

    def over(self, edges: NDArray[np.int64]) -> Floats:
        """The sum over each stage; ``edges``: the first layer of every stage, and the number of layers after the last."""
        sums = np.diff(self.whole[edges])
        sums[0] += self.first
        sums[-1] += self.last
        return sums


class Bounds:
    """Lower bounds for one problem; unit costs are priced once for each micro-batch and tensor degree."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._nodes = problem.cluster.groups[0]
        self._network = Network(self._nodes)
        self._pricer = UnitPricer(problem.graph, self._nodes, self._network, problem.job.precision)
        self._bytes_per_s = self._pricer.rates.bytes_per_s
        on_cpu = is_cpu(self._nodes.device)
        self._slowest = 1.0 if on_cpu else 1.0 + slowest_share(problem.cluster.num_devices)
        self._overlap = 0.0 if is_cpu(self._nodes.device) else 1.0
        self._layers_per_stage = problem.constraints.layers_per_stage
        self._units = cache(self._units_of)
        self._edges = cache(self._edges_of)
        self._sums = cache(self._sums_of)
        self._ranks = cache(self._per_rank)
        self._traits = cache(self._traits_of)
        self._data_s = cache(self._data_parallel_s)
        self._launches_per_operator = self._traits(0, False, False).host_launches_per_operator

    def time_s(self, space: Space, mask: Mask) -> Floats:
        """Seconds that each row of ``mask`` takes at least; infinite elsewhere."""
        names = (
            "replicate",
            "shard",
            "zero",
            "tensor",
            "pipeline",
            "virtual",
            "micro_batch",
            "recompute",
            "micro_batches",
        )
        return self._over(space, mask, names, self._row_time_s)

    def memory_bytes(self, space: Space, mask: Mask) -> Floats:
        """Bytes that the fullest rank of each row of ``mask`` needs at least; infinite elsewhere."""
        names = (
            "replicate",
            "shard",
            "zero",
            "tensor",
            "pipeline",
            "virtual",
            "micro_batch",
            "recompute",
            "micro_batches",
        )
        return self._over(space, mask, (*names, "schedule"), self._row_memory_bytes)

    def most_that_fits_bytes(self) -> float:
        """Bytes above which a forecast does not fit: ``forecast.memory.fit_probability`` solved for its argument."""
        sigma = memory.need_error()
        return self._problem.capacity_bytes * float(np.exp(-NormalDist().inv_cdf(FIT_PROBABILITY) * sigma))

    def _over(self, space: Space, mask: Mask, names: tuple[str, ...], bound: Callable[..., float]) -> Floats:
        """Evaluate ``bound`` once for each distinct combination of columns."""
        found = np.full(len(space), np.inf)
        rows = np.flatnonzero(mask)
        if not len(rows):
            return found
        table = np.stack([getattr(space, name)[rows] for name in names], axis=1)
        keys, where = np.unique(table, axis=0, return_inverse=True)
        full = [name == "full" for name in space.recompute_names]
        values = []
        for key in keys.tolist():
            row = dict(zip(names, key, strict=True))
            row["recompute"] = full[row["recompute"]]
            values.append(bound(**row))
        found[rows] = np.array(values)[where.reshape(-1)]
        return found

    def _row_time_s(
        self, replicate: int, shard: int, zero: int, tensor: int, pipeline: int, virtual: int, micro_batch: int,
        recompute: bool, micro_batches: int,
    ) -> float:  # fmt: skip
        ranks = self._ranks(tensor, pipeline, virtual, micro_batch, recompute)
        traits = self._traits(zero, shard > 1, pipeline > 1)
        each_s, once_s = self._data_s(replicate, shard, zero, tensor, pipeline, virtual, micro_batch, micro_batches > 1)
        work_s = micro_batches * np.maximum(ranks.device_s + each_s, ranks.host_s) + once_s
        moved = 2 * (traits.master_weight_bytes + traits.optimizer_state_bytes) + traits.gradient_bytes
        optimizer_s = float(ranks.parameters.max()) / shard * moved / self._bytes_per_s
        return (float((ranks.fill_s + work_s + ranks.drain_s).max()) + optimizer_s) * self._slowest

    def _row_memory_bytes(
        self, replicate: int, shard: int, zero: int, tensor: int, pipeline: int, virtual: int, micro_batch: int,
        recompute: bool, micro_batches: int, schedule: int,
    ) -> float:  # fmt: skip
        units = self._units(micro_batch, tensor)
        ranks = self._ranks(tensor, pipeline, virtual, micro_batch, recompute)
        traits = self._traits(zero, shard > 1, pipeline > 1)
        degrees = (replicate, shard, tensor, pipeline, replicate * shard * tensor * pipeline)
        most = 0.0
        for rank in {0, pipeline - 1}:
            last = rank == pipeline - 1
            outside = (units.embedding.parameters if rank == 0 else 0) + (units.head.parameters if last else 0)
            weights = memory.RankWeights(int(ranks.parameters[rank]), self._least_block(micro_batch, tensor), outside)
            parts = memory.state_bytes(weights, traits, shards=shard, micro_batches=micro_batches)
            held = _held_bytes(ranks, rank, GENERATED[schedule], pipeline, virtual, micro_batches)
            if micro_batches == 1:  # gradients grow as activations go
                held = max(held - parts["gradients"], 0.0)
            if pipeline > 1:  # a buffer for everything that a rank receives; its ends receive on one side
                held += (2 * virtual - 1) * (micro_batches if traits.torch_pipeline else 1) * units.hidden_bytes
            states = sum(parts.values()) + held + _temporary_bytes(units, last and virtual == 1, recompute)
            needed = memory.rank_memory({"all": int(states)}, self._nodes.device, sum(d > 1 for d in degrees))
            most = max(most, needed.total)
        return most

    def _least_block(self, micro_batch: int, tensor: int) -> int:
        return min((unit.parameters for unit in self._units(micro_batch, tensor).blocks), default=0)

    def _units_of(self, micro_batch: int, tensor: int) -> Units:
        # Axes that are not searched are the user's own, the same in every row.
        given = self._problem.constraints.given
        keys = ("enable_sequence_parallel", "context_parallel_degree", "expert_parallel_degree")
        layout = Parallelism(tensor_parallel_degree=tensor, **{key: given[key] for key in keys if key in given})
        axes = axes_of(layout, self._nodes.devices_per_node)
        return self._pricer.units(micro_batch, axes, self._traits(0, False, False))

    def _traits_of(self, zero: int, sharded: bool, pipelined: bool, split: bool = False) -> Traits:
        """Of any layout that is alike in what an engine's traits look at."""
        layout = Parallelism(
            zero_stage=zero,
            data_parallel_shard_degree=2 if sharded else 1,
            pipeline_parallel_degree=2 if pipelined else 1,
            tensor_parallel_degree=2 if split else 1,
        )
        choice = self._problem.engine
        return get(choice.name).traits(self._problem.job, layout, choice)

    def _per_rank(self, tensor: int, pipeline: int, virtual: int, micro_batch: int, recompute: bool) -> PerRank:
        sums = self._sums(micro_batch, tensor, recompute)
        edges = self._edges(pipeline, virtual)
        forward_s, forward_host_s = self._pass_s(sums, "forward", edges)
        backward_s, backward_host_s = self._pass_s(sums, "backward", edges)
        stage_forward, stage_backward = np.maximum(forward_s, forward_host_s), np.maximum(backward_s, backward_host_s)
        stage_kept, stage_parameters = sums["kept"].over(edges), sums["parameters"].over(edges)
        before = np.arange(pipeline)  # the first stage of rank r is stage r
        return PerRank(
            device_s=(forward_s + backward_s).reshape(virtual, pipeline).sum(0),
            host_s=(forward_host_s + backward_host_s).reshape(virtual, pipeline).sum(0),
            fill_s=np.concatenate([[0.0], np.cumsum(stage_forward)])[before],
            drain_s=np.concatenate([[0.0], np.cumsum(stage_backward)])[before],
            parameters=stage_parameters.reshape(virtual, pipeline).sum(0),
            kept_bytes=stage_kept.reshape(virtual, pipeline).sum(0),
            least_kept_bytes=stage_kept.reshape(virtual, pipeline).min(0),
        )

    def _sums_of(self, micro_batch: int, tensor: int, recompute: bool) -> dict[str, RunningSum]:
        """Running sums over the layers of everything that is asked of stages."""
        units = self._units(micro_batch, tensor)
        again = _forward if recompute else (lambda _: Work())
        own = self._traits(0, False, False, tensor > 1).host_operators_per_unit / 2

        def kept(unit: Unit) -> float:
            return min(units.hidden_bytes, unit.memory.saved) if recompute else unit.memory.saved

        def running(of_block: Callable[[Unit], float], of_end: Callable[[Unit], float]) -> RunningSum:
            kinds = np.array([of_block(unit) for unit in units.blocks], dtype=float)
            layers = kinds[np.array(units.layers, dtype=np.int64)] if len(kinds) else np.zeros(0)
            return RunningSum.of(layers, of_end(units.embedding), of_end(units.head))

        return {
            "forward_s": running(lambda u: _forward(u).device_s, lambda u: _forward(u).device_s),
            "forward_launches": running(lambda u: _forward(u).launches, lambda u: _forward(u).launches),
            "backward_s": running(lambda u: (_backward(u) + again(u)).device_s, lambda u: _backward(u).device_s),
            "backward_launches": running(lambda u: (_backward(u) + again(u)).launches, lambda u: _backward(u).launches),
            "own_launches": running(lambda _: own, lambda _: 0.0),
            "kept": running(kept, lambda u: u.memory.saved),
            "parameters": running(lambda u: u.parameters, lambda u: u.parameters),
        }

    def _pass_s(self, sums: dict[str, RunningSum], name: str, edges: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Seconds of one pass over each stage: of the device with its collectives, and of the host that launches it."""
        device_s = sums[f"{name}_s"].over(edges)
        if self._overlap == 0.0:
            return device_s, np.zeros_like(device_s)
        host = sums[f"{name}_launches"].over(edges) * self._launches_per_operator + sums["own_launches"].over(edges)
        return device_s, host * self._nodes.device.kernel_launch_s

    def _edges_of(self, pipeline: int, virtual: int) -> NDArray[np.int64]:
        """The first layer of every stage, and the number of layers after the last."""
        layout = Parallelism(
            pipeline_parallel_degree=pipeline, virtual_stages_per_rank=virtual, layers_per_stage=self._layers_per_stage
        )
        return np.cumsum([0, *layers_of_stages(layout, self._problem.graph.num_layers)])

    def _data_parallel_s(
        self, replicate: int, shard: int, zero: int, tensor: int, pipeline: int, virtual: int, micro_batch: int,
        many: bool,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """What gathering and reducing take at least, per rank: for each micro-batch, and once per step."""
        units, traits = self._units(micro_batch, tensor), self._traits(zero, shard > 1, pipeline > 1)
        per_node = self._nodes.devices_per_node
        data = DataParallel(
            shard=strided_group(shard, tensor, per_node),
            replicate=strided_group(replicate, shard * tensor, per_node),
            traits=traits,
            micro_batches=2 if many else 1,
            overlap=self._overlap,
        )
        gather = 1.0 - self._overlap * traits.parameter_gather_overlap * (1.0 - CONTENTION)
        reduce = 1.0 - self._overlap * traits.gradient_overlap * (1.0 - CONTENTION)

        def each(unit: Unit) -> float:
            count = Weights.of(unit)
            found = (gather * data.gather_s(count, self._network)) * (
                (traits.forward_gathers == "per_micro_batch") + (traits.backward_gathers == "per_micro_batch")
            )
            return found + reduce * data.reduce_s(count, self._network) * traits.reduces_every_micro_batch

        def once(unit: Unit) -> float:
            count = Weights.of(unit)
            found = gather * data.gather_s(count, self._network) * (traits.forward_gathers == "per_step")
            found += reduce * data.replicas_s(count, self._network)
            return found + reduce * data.reduce_s(count, self._network) * (not traits.reduces_every_micro_batch)

        # Embedding and head may be one unit of communication with others: only blocks are counted.
        kinds = np.array([(each(unit), once(unit)) for unit in units.blocks]).reshape(-1, 2)
        edges, layers = self._edges(pipeline, virtual), np.array(units.layers, dtype=np.int64)
        rows = [RunningSum.of(kinds[layers, i], 0.0, 0.0).over(edges) for i in (0, 1)]
        each_s, once_s = (row.reshape(virtual, pipeline).sum(0) for row in rows)
        return each_s, once_s


def _forward(unit: Unit) -> Work:
    return unit.times.forward + Work(unit.tensor_forward_s, 0.0)


def _backward(unit: Unit) -> Work:
    """Collectives of the backward pass may hide behind the weight gradients: what they slow down remains."""
    shown_s = max(CONTENTION * unit.tensor_backward_s, unit.tensor_backward_s - unit.times.weight_gradient.device_s)
    return unit.times.input_gradient + unit.times.weight_gradient + Work(shown_s, 0.0)


def _held_bytes(ranks: PerRank, rank: int, schedule: str, pipeline: int, virtual: int, micro_batches: int) -> float:
    """Activations that the rank holds at once, at least."""
    if pipeline == 1:
        return float(ranks.kept_bytes[rank])
    if schedule == "GPipe":
        return micro_batches * float(ranks.kept_bytes[rank])
    if schedule == "1F1B":
        return min(micro_batches, pipeline - rank) * float(ranks.kept_bytes[rank])
    per_round = micro_batches // max(1, micro_batches // pipeline)
    forwards = (virtual - 1) * per_round + 2 * (pipeline - 1 - rank) + 1
    return min(forwards, micro_batches * virtual) * float(ranks.least_kept_bytes[rank])


def _temporary_bytes(units: Units, last: bool, recompute: bool) -> int:
    """Needed at the peak of one backward pass beyond what is kept, at least; ``last``: of the stage with the head."""
    blocks = [unit.memory for unit in units.blocks]
    needs = [m.backward_extra + (max(m.saved, m.forward_extra) if recompute else 0) for m in blocks]
    head = units.head.memory
    if not last:
        return min(needs, default=0)
    return max(0, head.forward_extra, head.backward_extra, min(needs, default=0) - head.saved)
