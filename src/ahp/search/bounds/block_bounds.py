"""Lower bounds of all layouts of a block at once, of time and memory.

In any cut into stages, a step takes at least the time of its layers, spread evenly over the pipeline's ranks, and of the forward passes
that fill the pipeline before an average rank can start. The fullest rank holds its share of the layers' states, and of what they keep
for the micro-batches in flight. With the cut that rows have, a step takes at least the longest path through the fastest schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ahp.arrays import Floats, Ints, unique_rows
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.candidates.least_layers import LeastLayers
from ahp.forecast.candidates.sharding_columns import ShardingColumns
from ahp.forecast.candidates.shardings import Shardings
from ahp.forecast.turns import least_share
from ahp.schedule.bounds import in_flight
from ahp.search.bounds.paths import Path
from ahp.search.bounds.pipelines import Pipelines
from ahp.search.choices import ScheduleChoice
from ahp.search.problem import Problem
from ahp.search.space import Space

MULTIPLIED = 256
"""Blocks whose paths are summed in one product: numpy runs so small a product on one thread. [Empirical] DeepSeek-V3 on 2,048 devices, on two busy
cores: products of all blocks at once took 0.8 to 3.4 s of processor time, most of it threads that wait for each other, these take 0.07."""


def layers_before(asked: Problem, p: Floats | Ints | int) -> Any:
    """Least number of layers before an average rank: each stage before it has at least one, except for an empty end."""
    return (p - 1) / 2 - (asked.stage_ends != "hold_layers") * (p - 1) / p


def work_bounds_s(
    asked: Problem, space: Space, which: Ints, stages: Sequence[LayerColumns], copies_s: Floats
) -> Floats:
    """[number of these] Lower bound in seconds of every layout of some blocks; ``stages``, ``copies_s`` [number of these, K]: of each block."""
    blocks = space.blocks.at(which)
    p, m = blocks.pipeline, blocks.micro_batches
    figures = [(of.least_forward_s, of.micro_batch_s, of.host_micro_batch_s) for of in stages]
    forward_s, micro_batch_s, host_s = np.array(figures).reshape(-1, 3).T
    micro_batch_s = np.maximum(micro_batch_s + copies_s @ _counts(asked), host_s)
    before_s, work_s = layers_before(asked, p) * forward_s, m * micro_batch_s / p
    pricer = asked.pricer
    return np.maximum(work_s, (before_s + work_s) * least_share(pricer.turns, p)) * pricer.stretch


def block_bounds_s(
    asked: Problem, space: Space, pipelines: Pipelines, which: Ints, copies_s: Floats
) -> tuple[Floats, Floats]:
    """[number of these] each: lower bounds of every layout of some blocks, and of every row, before the layers are priced."""
    found, layers = LeastLayers(asked.pricer), asked.graph.num_layers
    blocks = space.blocks.at(which)
    pipeline, m = blocks.pipeline, blocks.micro_batches
    degrees = blocks.tensor, blocks.context, blocks.expert, blocks.sequence_parallel, space.folded(blocks)
    computed_s, collectives_s = found.beside_s(*degrees, blocks.micro_batch, space.local(blocks.mesh))
    beside_s = copies_s + computed_s + collectives_s  # [number of these, K]
    products_s = found.products_s() / asked.cluster.num_devices
    # Mean over the ranks: work, and the forwards of earlier stages, each with the fewest layers that any cut leaves it.
    shortest = layers // (pipeline * np.maximum(asked.most_stages // pipeline, 1))
    of_replica = blocks.micro_batch / (blocks.tensor * blocks.context)
    fill_s = (pipeline - 1) / 2 * shortest * found.layer_forward_s() * of_replica
    work_s = products_s + m * (beside_s @ _counts(asked)) / pipeline
    bound = np.maximum(work_s, (fill_s + work_s) * least_share(asked.pricer.turns, pipeline)) * asked.pricer.stretch
    layer_s = np.zeros((len(which), len(Path._fields), len(asked.graph.blocks)))
    layer_s[:, :3] = of_replica[:, None, None] * found.products_of_kinds_s()
    return bound, np.maximum(bound, schedule_bounds_s(asked, space, pipelines, which, layer_s, beside_s))


def schedule_bounds_s(
    asked: Problem, space: Space, pipelines: Pipelines, which: Ints, layer_s: Floats, either_s: Floats
) -> Floats:
    """[number of these] Lower bound in seconds of the schedule of every row of some blocks, whatever its memory.

    ``layer_s``: [number of these, parts of a ``Path``, K] of a layer; ``either_s``: [number of these, K] further seconds of it, in the pass
    with fewer layers.
    """
    blocks, found = space.blocks.at(which), np.zeros(len(which))
    if not layer_s.size:
        return found
    each_s = np.concatenate([layer_s, either_s[:, None]], axis=1).reshape(len(which), -1)
    for (p, m), of in _alike(blocks.pipeline, blocks.micro_batches):
        paths = pipelines.paths(space.legal_pipes(p, m), p, m)
        counts = np.concatenate([paths, paths[..., :2, :].min(axis=-2, keepdims=True)], axis=-2)
        counts = counts.reshape(*counts.shape[:2], -1)
        for some in np.split(of, range(MULTIPLIED, len(of), MULTIPLIED)):
            paths_s = counts @ each_s[some].T  # [L, C, some of the blocks]
            found[some] = paths_s.max(axis=0).min(axis=0)
    return found * asked.pricer.stretch * least_share(asked.pricer.turns, blocks.pipeline)


def block_needs_bytes(asked: Problem, space: Space, which: Ints, splits: Callable[[int], Shardings]) -> Floats:
    """[number of these] Least bytes that the fullest rank of every row of some blocks needs.

    ``splits``: the ways to share states of a block and of all blocks that differ from it only in where ranks lie.
    """
    of = space.blocks.at(which)
    if not len(of):
        return np.zeros(0)
    # Where ranks lie changes no memory.
    columns = of.tensor, of.context, of.pipeline, of.expert, of.sequence_parallel, of.data, of.micro_batch
    _, at, first = unique_rows(*columns)
    return _needs_bytes(asked, space, which[first], [splits(block) for block in which[first].tolist()])[at]


def least_copies_s(asked: Problem, space: Space, splits: Callable[[int], Shardings]) -> Floats:
    """[blocks, K] Seconds per micro-batch to copy a layer's gradients, with the way to share states that copies least.

    ``splits``: as in ``block_needs_bytes``.
    """
    of = space.blocks
    if not len(of):
        return np.zeros((0, len(asked.graph.blocks)))
    columns = of.tensor, of.context, of.pipeline, of.expert, of.sequence_parallel, of.data, of.micro_batches
    _, at, first = unique_rows(*columns)
    each = [splits(block) for block in first.tolist()]
    states = _States({id(one): one for one in each}.values(), LeastLayers(asked.pricer).parameters, _counts(asked))
    rows, block, starts = states.rows(each)
    copied = states.copied_bytes(rows, of.micro_batches[first][block])
    return np.minimum.reduceat(copied, starts)[at] / asked.pricer.group.unit_pricer.rates.bytes_per_s


@lru_cache(maxsize=1 << 12)
def fewest_in_flight(pipes: tuple[ScheduleChoice, ...], pipeline: int, micro_batches: int) -> Ints:
    """[kinds, p] Least number of micro-batches of which each rank keeps something at once, wherever on the rank a layer lies; for
    the pipelines that can hold the least."""
    if pipeline == 1:
        return np.ones((1, 1), dtype=np.int64)
    counts = [in_flight(name, pipeline, virtual, micro_batches).min(axis=1) for name, virtual in pipes]
    found = np.array(sorted({tuple(count.tolist()) for count in counts}))
    # A pipeline in which no rank keeps fewer than in another one holds no less.
    no_fewer = (found[:, None] >= found).all(axis=-1)
    return found[no_fewer.sum(axis=1) == 1]


def fullest_of_any_cut(each: Floats, counts: Ints) -> Floats:
    """Least that the fullest rank holds, for any division of ``counts`` [K] layers of each kind among ranks that hold ``each`` [..., p, K] of a
    layer.

    A rank holds no less than the mean of all, whatever their weights. Weights that make layers of average kind equally heavy on all ranks
    give the least itself where there is one kind.
    """
    weights = 1.0 / np.maximum(each @ (counts / max(counts.sum(), 1)), 1e-9)
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights[..., None] * each).min(axis=-2) @ counts


def _needs_bytes(asked: Problem, space: Space, which: Ints, splits: Sequence[Shardings]) -> Floats:
    """[blocks] ``block_needs_bytes`` of distinct blocks; ``splits``: one for each block, several can be one object."""
    of, layers = space.blocks.at(which), LeastLayers(asked.pricer)
    cut = of.context * np.where(of.sequence_parallel > 0, of.tensor, 1)
    kept = layers.kept_bytes * of.micro_batch / asked.graph.micro_batch_size / cut
    states = _States({id(one): one for one in splits}.values(), layers.parameters, _counts(asked))
    rows, block, starts = states.rows(splits)
    found = np.empty(len(rows))
    for (p, m), at in _alike(of.pipeline[block], of.micro_batches[block]):
        in_flight = fewest_in_flight(space.pipes(int(which[block[at[0]]])), p, m)
        found[at] = states.needs_bytes(rows[at], kept[block[at]], in_flight, m)
    return np.minimum.reduceat(found, starts)


class _States:
    """The states of a layer of each kind under each of several ways to share them, one block's ways after the other's."""

    def __init__(self, splits: Iterable[Shardings], parameters: tuple[Ints, Ints], counts: Ints) -> None:
        """``parameters``: [K] each, of a layer outside its experts, and in its experts; ``counts``: [K] layers of each kind."""
        each, (dense, experts) = list(splits), parameters
        lengths = [len(one.layouts) for one in each]
        self._number = {id(one): number for number, one in enumerate(each)}
        self._lengths, self._starts = np.array(lengths), np.cumsum([0, *lengths[:-1]])
        self._columns, self._counts = ShardingColumns.joined([one.columns for one in each]), counts
        ranks = np.repeat([[one.tensor, one.ranks_of_an_expert] for one in each], lengths, axis=0)
        own = dense // ranks[:, :1], experts // ranks[:, 1:]
        self._parameters = own[0] + own[1]
        """[N, K]"""
        # A rank's states depend only on whether there are several micro-batches.
        self._of_layer = [self._columns.states_of_layer(*own, m) for m in (1, 2)]

    def rows(self, splits: Sequence[Shardings]) -> tuple[Ints, Ints, Ints]:
        """The ways of some blocks, the block that has each, and where each block's ways begin."""
        numbers = np.array([self._number[id(one)] for one in splits])
        lengths = self._lengths[numbers]
        starts = np.cumsum(lengths) - lengths
        rows = np.repeat(self._starts[numbers] - starts, lengths) + np.arange(lengths.sum())
        return rows, np.repeat(np.arange(len(splits)), lengths), starts

    def copied_bytes(self, rows: Ints, micro_batches: Ints) -> Floats:
        """[rows, K] Bytes moved per micro-batch to copy a layer's gradients; ``micro_batches``: [rows]."""
        _, copied = self._columns.part(rows).moved_bytes(micro_batches[:, None])
        return copied * self._parameters[rows]

    def needs_bytes(self, rows: Ints, kept: Floats, in_flight: Ints, micro_batches: int) -> Floats:
        """[rows] Least bytes that the fullest rank needs; ``kept``: [rows] bytes of activations of a layer and a micro-batch."""
        states, gradients = (part[rows] for part in self._of_layer[micro_batches > 1])
        held = (in_flight * kept[:, None, None])[..., None]  # [rows, C, p, 1]
        gradients = np.broadcast_to(gradients, states.shape)[:, None, None]
        average = gradients @ (self._counts / max(self._counts.sum(), 1))
        beyond = np.where(held > average[..., None], held - gradients, 0.0)
        least = fullest_of_any_cut(states[:, None, None] + beyond, self._counts).min(axis=-1, keepdims=True)
        return self._columns.part(rows).device_bytes(least)[:, 0]


def _counts(asked: Problem) -> Ints:
    """[K] Layers of each kind."""
    return np.array(asked.graph.layers_of_kinds, dtype=np.int64)


def _alike(*columns: Ints) -> Iterator[tuple[list[int], Ints]]:
    """The distinct rows of a table, and where each row occurs."""
    keys, at, _ = unique_rows(*columns)
    order = np.argsort(at, kind="stable")
    ends = np.cumsum(np.bincount(at, minlength=len(keys)))
    yield from zip(keys.tolist(), np.split(order, ends[:-1]) if len(keys) else (), strict=True)
