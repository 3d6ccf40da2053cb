"""Bounds of many blocks at once from the times of their layers: a rank holds some layers of each kind, and waits for others.

This level comes between the work of the priced units alone, which ignores how states are shared, and ``block_rows``, which bounds every row.
Blocks are bounded together because most are excluded here, and each alone is too small for arrays to pay.

Dims: B = blocks, N = ways to share states of all blocks, one block after the other, R = kinds of recompute, K = kinds of
layers, C = kinds of pipelines, L = paths through these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.cached_method import cached_method
from ahp.forecast.beside_stages import gathers_ahead, share_ahead, share_beside
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.candidates.layer_costs import LayerCosts, launched, layer_costs
from ahp.forecast.candidates.sharding_columns import ShardingColumns
from ahp.forecast.candidates.shardings import CollectiveTimes, Shardings
from ahp.forecast.states import Weights
from ahp.forecast.turns import least_share
from ahp.schedule.registry import get
from ahp.search.bounds.paths import FullestRanks
from ahp.search.bounds.pipelines import Pipelines
from ahp.search.choices import ScheduleChoice
from ahp.search.problem import Problem
from ahp.search.space import Rows

T = TypeVar("T")

Ways = Callable[[int, ScheduleChoice, str], bool]
"""Whether an engine can recompute a part of the layers, from the pipeline ranks, the schedule and the kind of recompute."""


@dataclass(frozen=True)
class PricedBlock:
    """One block, and its layers priced for its axes and micro-batch."""

    rows: Rows
    splits: Shardings
    stages: LayerColumns
    p: int
    """Pipeline ranks."""
    m: int
    """Micro-batches."""
    after_s: float
    """Seconds once per step, independent of the layers: the norm, and the gradient of tied weights."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers for what a rank receives from each stage."""
        return (self.m if self.splits.traits[0].pipeline.receives == "all" else 1) * self.stages.units.hidden_bytes


class LayerBounds:
    """Some blocks of one problem; blocks with the same pipelines are adjacent."""

    def __init__(self, asked: Problem, pipelines: Pipelines, blocks: Sequence[PricedBlock]) -> None:
        self.asked, self.pipelines, self.blocks = asked, pipelines, blocks
        counts = [len(block.splits.layouts) for block in blocks]
        self._starts = np.cumsum([0, *counts])
        self._of = np.repeat(np.arange(len(blocks)), counts)
        """[N] The block of each way to share states."""
        self.ways = ShardingColumns.joined([block.splits.columns for block in blocks])
        self._m = np.array([[block.m] for block in blocks], dtype=np.int64)
        self._update_of_one_s = np.concatenate([block.splits.update_of_one_s(asked.pricer) for block in blocks])

    # Bounds of all rows that fit.

    def of_rows_s(self, most_bytes: float) -> Floats:
        """[B] Lower bound in seconds of all rows that fit; infinite if none does."""
        found = np.full(len(self._of), np.inf)
        for first, end in self._alike():
            rows = self._rows(first, end)
            found[rows] = self._least_s(first, rows, most_bytes)
        return self._of_blocks(found)

    def _rows(self, first: int, end: int) -> slice:
        """The ways to share states of the blocks from ``first`` to before ``end``."""
        return slice(int(self._starts[first]), int(self._starts[end]))

    def _alike(self) -> Iterator[tuple[int, int]]:
        """Ranges of adjacent blocks with the same pipelines: the first block, and the one after the last."""
        first = 0
        for at in range(1, len(self.blocks) + 1):
            if at == len(self.blocks) or self._pipes(at) != self._pipes(first):
                yield first, at
                first = at

    def _pipes(self, block: int) -> tuple[object, ...]:
        return self.blocks[block].p, self.blocks[block].rows.pipes

    def _of_blocks(self, found: Floats) -> Floats:
        """[B] The least seconds of each block over its ways [N], with what comes after all layers."""
        after_s, p = np.array([block.after_s for block in self.blocks]), np.array([block.p for block in self.blocks])
        bounds_s = np.minimum.reduceat(found, self._starts[:-1]) + after_s
        return bounds_s * self.asked.pricer.stretch * least_share(self.asked.pricer.turns, p)

    def _pipelines_s(self, first: int, rows: slice) -> Floats:
        """[rows, C, R] Seconds of the longest path through each pipeline, without the optimizer."""
        device_s = self._paths_s(first, rows, self._costs.part(rows), self._column("head_s"))
        if self._launched is None:
            return device_s
        no_head_s = np.zeros((len(self.blocks), 1))
        return np.maximum(device_s, self._paths_s(first, rows, self._launched.part(rows), no_head_s))

    def _paths_s(self, first: int, rows: slice, layer: LayerCosts, heads_s: Floats) -> Floats:
        """[rows, C, R] Seconds of the longest path with these layers and heads. ``layer``: [rows, R, K]; ``heads_s``: [B, 1]."""
        of = self._of[rows]
        head_s = np.broadcast_to(heads_s[of][..., None], layer.forward.shape)
        beside = self._beside[rows][..., None]
        last = (1.0 - beside) * layer.last_backward, beside * layer.last_backward
        ahead = share_ahead(self.ways.part(rows).traits, self.blocks[0].stages.data.overlap)[..., None]
        once = layer.first_forward + (1.0 - ahead) * layer.first_gather, ahead * layer.first_gather
        parts = np.stack([layer.forward, layer.backward, layer.input_gradient, *once, *last, head_s], axis=1)
        each_s = parts.swapaxes(2, 3).reshape(len(of), -1, parts.shape[2])  # [rows, parts x K, R]
        paths = np.array([self._of_pipelines(self.pipelines.paths, at) for at in range(first, int(of[-1]) + 1)])
        paths_s = paths.reshape(*paths.shape[:3], -1)[of - first] @ each_s[:, None]  # [rows, L, C, R]
        return paths_s.max(axis=1)

    def _least_s(self, first: int, rows: slice, most_bytes: float) -> Floats:
        """[rows] Seconds with the optimizer, of the fastest pipeline and recompute that fit."""
        fullest = [self._of_pipelines(self.pipelines.fullest, at) for at in range(first, int(self._of[rows][-1]) + 1)]
        of, most = self._of[rows], fullest[0].most_layers
        dense, experts = (self._kinds_of(name)[of] @ most.T for name in ("dense", "experts"))
        updates_s = self._updates_s(rows, dense, experts, most.sum(axis=1))
        seconds_s = self._pipelines_s(first, rows) + updates_s[..., None]
        held = np.array([ranks.held for ranks in fullest], dtype=float)
        fits = self._fits(rows, fullest[0], held[of - first], most_bytes)
        return np.where(fits, seconds_s, np.inf).min(axis=(1, 2))

    def _of_pipelines(self, figures: Callable[[tuple[ScheduleChoice, ...], int, int], T], block: int) -> T:
        one = self.blocks[block]
        return figures(one.rows.pipes, one.p, one.m)

    def _fits(self, rows: slice, front: FullestRanks, held: Floats, most_bytes: float) -> Mask:
        """[rows, C, R] Whether the ranks of each pipeline can fit; ``held``: [rows, C, G, K]."""
        of, ways, shape = self._of[rows], self.ways.part(rows), held.shape[:3]
        layers = front.layers.reshape(-1, front.layers.shape[-1])
        parameters, experts = (self._kinds_of(name)[of] @ layers.T for name in ("parameters", "experts"))
        states, gradients = ways.states(Weights(parameters, experts=experts), self._m[of])
        kept = held.reshape(len(of), -1, held.shape[-1]) @ self._kept[of].swapaxes(1, 2)
        allocated = np.maximum(kept - gradients[..., None], 0.0)
        allocated += (states + front.received.reshape(-1) * self._buffers[of])[..., None]
        return np.asarray((ways.device_bytes(allocated) <= most_bytes).reshape(*shape, -1).all(axis=2))

    def _updates_s(self, rows: slice | Ints, dense: Floats, experts: Floats, layers: Floats | Ints | int) -> Floats:
        """[rows, C] Seconds of the update of ranks with these parameters and layers; for Muon, whose matrices a stage's ranks share, the
        least it takes."""
        of, muon, ways = self._of[rows], self.asked.pricer.group.muon, self.ways.part(rows)
        weights = Weights(dense + experts, experts=experts)
        update_s = ways.updated(weights) * self._update_of_one_s[rows]
        return update_s if muon is None else update_s + layers * (muon.least_s() / self._ranks_of_stage[of])

    @cached_property
    def _ranks_of_stage(self) -> Ints:
        """[B, 1]"""
        return np.array([[block.splits.layouts[0].world_size // block.p] for block in self.blocks], dtype=np.int64)

    # Times and bytes of layers.

    @cached_method
    def _column(self, name: str) -> Floats:
        """[B, 1] A figure of the blocks' layers, by its name."""
        return np.array([[getattr(block.stages, name)] for block in self.blocks], dtype=float)

    @cached_method
    def _kinds_of(self, name: str) -> Floats:
        """[B, K] A figure of each kind of the blocks' layers."""
        return np.array([getattr(block.stages, name) for block in self.blocks])

    @cached_method
    def _of_stages(self, name: str) -> Floats:
        """[N, ...] The same, or other figures of the blocks' layers, one for each way to share states."""
        return self._kinds_of(name)[self._of]

    @cached_property
    def _ahead(self) -> Floats:
        """[N, 1] Share of the weights gathered once per step whose gather begins with the step, in some pipeline."""
        some = [
            any(gathers_ahead(get(pipe.schedule), pipe.virtual) for pipe in block.rows.pipes) for block in self.blocks
        ]
        return np.array(some)[self._of, None] * share_ahead(self.ways.traits, self.blocks[0].stages.data.overlap)

    @cached_property
    def _beside(self) -> Floats:
        """[N, 1] Share of what comes with the last backward pass that overlaps with a rank's other stages, if it can have several."""
        most = np.array([[max(pipe.virtual for pipe in block.rows.pipes)] for block in self.blocks])[self._of]
        return share_beside(most, self.ways.traits, self.blocks[0].stages.data.overlap)

    @cached_property
    def _buffers(self) -> Floats:
        """[B, 1] Bytes that a rank holds for what each stage before or after its own sends."""
        return np.array([[block.buffer_bytes] for block in self.blocks], dtype=float)

    @cached_property
    def _kept(self) -> Floats:
        """[B, R, K] Least bytes that a layer keeps of a micro-batch."""
        return np.array([block.stages.kept for block in self.blocks])

    @cached_property
    def _costs(self) -> LayerCosts:
        """[N, R, K] What a layer of each kind adds to its stage."""
        found = [block.splits.collectives_of_kinds(block.stages.weights) for block in self.blocks]
        is_whole = np.array([block.p == 1 for block in self.blocks])[self._of, None, None]
        layers, m = [block.stages for block in self.blocks], self._m[self._of]
        bytes_per_s = self.asked.pricer.group.unit_pricer.rates.bytes_per_s
        sent = CollectiveTimes(*map(np.concatenate, zip(*found, strict=True)))
        return layer_costs(self.ways, sent, layers, self._of, m, is_whole, bytes_per_s)

    @cached_property
    def _launched(self) -> LayerCosts | None:
        """[N, R, K] ``_costs`` with the host's seconds where the device waits for it; None if it never does."""
        layers = [block.stages for block in self.blocks]
        return launched(self._costs, self.ways.traits, layers, self._of, self._shares)

    @cached_property
    def _shares(self) -> Floats:
        """[K] Share of each kind among all layers."""
        return np.array(self.asked.graph.layers_of_kinds) / self.asked.graph.num_layers
