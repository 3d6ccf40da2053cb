"""Bounds of every row of one block from its priced units.

Dims: J = splits, R = kinds of recompute, U = distinct stages, S = stages, p = pipeline ranks, W = some of these ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.cached_method import cached_method
from ahp.forecast.assembly import message_bytes
from ahp.forecast.beside_stages import gathered_columns_s, gathers_ahead, share_ahead, share_beside
from ahp.forecast.candidates.layer_columns import BESIDE, LayerColumns
from ahp.forecast.candidates.shardings import Shardings
from ahp.forecast.memory import Peak, pooled_bytes
from ahp.forecast.mesh import pipeline_axis
from ahp.forecast.stage import StageCosts
from ahp.forecast.stage_memory import received_bytes, stage_weights
from ahp.forecast.states import UnitBytes, Weights
from ahp.schedule.bounds import TimeColumns, in_flight, lower_bounds_s
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.placement import Placement
from ahp.schedule.registry import of_ranks
from ahp.search.bounds.pipelines import Cut, Pipelines
from ahp.search.choices import ScheduleChoice
from ahp.search.problem import Problem
from ahp.search.space import Rows


@dataclass(frozen=True)
class RowBounds:
    """The bounds of every row of one block, in the rows' order."""

    times_s: Floats
    needs_bytes: Floats
    """Needs of the fullest rank."""


@dataclass(frozen=True)
class Beside:
    """Bytes on some ranks besides activations."""

    ranks: Ints
    """[W]"""
    states: Floats
    """[J, W]"""
    gradients: Floats
    """[J, W] The part of the states that activations can replace."""
    peak: Floats
    """[J, W, R] Temporaries, and units that are gathered and reduced."""
    units: UnitBytes
    """[J, W, 1]"""
    received: Ints
    """[W, 1] Received from other stages."""
    freed: Ints
    """[W, 1] The gap that the head leaves."""


class BlockRows:
    """One block with its units, its rows, and what they share."""

    def __init__(
        self,
        asked: Problem,
        pipelines: Pipelines,
        rows: Rows,
        splits: Shardings,
        stages: LayerColumns,
        m: int,
        size: int,
    ) -> None:
        """``stages``: the block's priced units; ``m``: micro-batches; ``size``: sequences of each."""
        self.asked, self.pipelines, self.rows, self.splits, self.m = asked, pipelines, rows, splits, m
        self.any = splits.layouts[0].model_copy(update={"micro_batch_size": size})
        self.p = self.any.pipeline_parallel_degree
        self.pricer, self.stages = asked.pricer, stages
        self.bytes_per_s = self.pricer.group.unit_pricer.rates.bytes_per_s
        self.units, self.recompute = stages.units, stages.recompute
        self._schedules_s = np.full(rows.shape, np.nan)
        """Lower bounds of the schedules of rows, without what follows them; nan until they are computed."""

    def bounds(self, most_bytes: float) -> RowBounds:
        """Bounds of every row; rows that need more than ``most_bytes`` take infinitely long."""
        needs = self.needs_bytes
        fits = needs <= most_bytes
        new = fits & np.isnan(self._schedules_s)
        if new.any():
            passes = self._pass_times(np.flatnonzero(new.any(axis=(1, 2))))
            for virtual in dict.fromkeys(pipe.virtual for pipe in self.rows.pipes):
                pipes = [i for i, pipe in enumerate(self.rows.pipes) if pipe.virtual == virtual and new[:, i].any()]
                if pipes:
                    self._time_rows(passes, np.asarray(new[:, pipes].any(axis=1)), pipes, virtual)
        times = self._schedules_s.copy()
        for index, pipe in enumerate(self.rows.pipes):
            times[:, index] += self._update_s(pipe.virtual, self._schedule(pipe).placement)
        after_s = self.pricer.group.after_s(self.any, self.units)
        times = np.where(fits, (times + after_s) * self.pricer.stretch, np.inf)
        return RowBounds(times.reshape(-1), needs.reshape(-1))

    @cached_property
    def _cut(self) -> Cut:
        return self.pipelines.cut(self.p, tuple(dict.fromkeys(pipe.virtual for pipe in self.rows.pipes)))

    def _pass_times(self, splits: Ints) -> dict[str, Floats]:
        """[J, R, U] each: the times of ``LayerColumns.seconds`` for these splits."""
        shape = len(self.splits.layouts), len(self.recompute), len(self._cut.stages.start)
        found = {name: np.zeros(shape) for name in (*(field.name for field in fields(StageCosts)), *BESIDE)}
        wanted = set(splits.tolist())
        for alike in self.splits.alike.values():
            at = [split for split in alike if split in wanted]
            if at:
                for name, seconds in self._seconds(at).items():
                    found[name][at] = seconds
        return found

    def _seconds(self, at: list[int]) -> dict[str, Floats]:
        cut = self._cut
        return self.stages.seconds(self.splits, at, self.m, cut.stages, cut.passes_behind, self.bytes_per_s)

    def _time_rows(self, passes: dict[str, Floats], rows: Mask, pipes: list[int], virtual: int) -> None:
        """Write lower bounds of the schedules of some rows [J, R] into ``_schedules_s``."""
        split, kind = np.nonzero(rows)
        stages = self._cut.of[virtual]
        beside = share_beside(virtual, self.splits.columns.traits, self.stages.data.overlap)[split]
        ahead = share_ahead(self.splits.columns.traits, self.stages.data.overlap)[split]
        of_rows = {name: seconds[split[:, None], kind[:, None], stages] for name, seconds in passes.items()}
        for index in pipes:
            pipe = self.rows.pipes[index]
            schedule = self._schedule(pipe)
            sends = self._sends(pipe.virtual, schedule.placement)
            last_s = of_rows["last_weight_gradient" if schedule.splits_backward else "last_backward"]
            first_s, gathered_s = of_rows["first_forward"], np.zeros(1)
            if gathers_ahead(schedule, virtual):
                own = self._own(virtual, schedule.placement)
                there_s, slowed_s = gathered_columns_s(of_rows["gathered"], own, of_rows["host"])
                gathered_s = ahead * there_s
                first_s = first_s + ahead * (slowed_s - of_rows["first_gather"])
            columns = TimeColumns(
                forward_s=of_rows["forward"],
                backward_s=of_rows["backward"],
                input_gradient_s=of_rows["input_gradient"],
                weight_gradient_s=of_rows["weight_gradient"],
                send_forward_s=sends[0],
                send_backward_s=sends[1],
                first_forward_extra_s=first_s,
                gathered_s=gathered_s,
                last_backward_extra_s=(1.0 - beside) * last_s,
                reduce_s=beside * last_s,
            )
            turns = self.pricer.turns
            found_s = lower_bounds_s(schedule.name, self.p, virtual, self.m, columns, turns=turns)
            self._schedules_s[split, index, kind] = found_s

    def _schedule(self, pipe: ScheduleChoice) -> PipelineSchedule:
        return of_ranks(pipe.schedule, self.p)

    @cached_method
    def _sends(self, virtual: int, placement: Placement) -> tuple[Floats, Floats]:
        """[1, S] each: seconds to send forward and backward, as in the forecast."""
        axis = pipeline_axis(self.any)
        pairs, at = self.pipelines.links(placement, axis, virtual)
        sent = self.pricer.group.sends_s(pairs, axis, message_bytes(self.any, self.splits.traits[0], self.units))
        between = np.array(sent, dtype=float)[at]
        return np.append(between, 0.0)[None], np.append(0.0, between)[None]

    @cached_method
    def _update_s(self, virtual: int, placement: Placement) -> Floats:
        """[J, 1] Seconds of clipping and AdamW on the rank where they take longest; for Muon, which distributes whole matrices over a
        stage's ranks, the least that these take."""
        at = self._cut.of[virtual][self._own(virtual, placement)]
        updated = self.splits.columns.updated(self._weights.of_ranks(at))
        updates_s = updated * self.splits.update_of_one_s(self.pricer)
        if self.pricer.group.muon is not None:
            layers = self._cut.stages.layers[at].sum(axis=1)
            updates_s = updates_s + layers * (self.pricer.group.muon.least_s() / (self.any.world_size // self.p))
        return updates_s.max(axis=1, keepdims=True)

    @cached_property
    def _weights(self) -> Weights:
        """[U]"""
        return stage_weights(self.stages.units, self._cut.stages)

    @cached_property
    def _temporary(self) -> Floats:
        """[2, R, U]"""
        return self.stages.temporary_bytes(self._cut.stages)

    def _own(self, virtual: int, placement: Placement) -> Ints:
        """[p, v] The stages of each rank."""
        return placement.rank_stages(self.p, virtual)

    @cached_property
    def needs_bytes(self) -> Floats:
        """Bytes of every row, in the rows' shape: of the rank that needs the most among the first two and the last."""
        kept = self.stages.kept_bytes(self._cut.stages)
        return np.stack([self._needs(pipe, kept) for pipe in self.rows.pipes], axis=1)

    def _needs(self, pipe: ScheduleChoice, kept: Floats) -> Floats:
        """[J, R]"""
        schedule = self._schedule(pipe)
        beside = self._beside(pipe.virtual, schedule.placement)
        counts = in_flight(schedule.name, self.p, pipe.virtual, self.m)[beside.ranks]
        own = self._cut.of[pipe.virtual][self._own(pipe.virtual, schedule.placement)[beside.ranks]]
        held = (counts * kept[:, own]).sum(axis=-1).T  # [W, R]
        at_peak = np.maximum(held - beside.gradients[..., None], 0.0) + beside.peak
        allocated = beside.states[..., None] + np.maximum(at_peak, beside.units.last) + beside.received
        pooled = pooled_bytes(beside.units, held)
        return self.splits.columns.device_bytes(allocated, pooled, beside.freed).max(axis=1)

    @cached_method
    def _beside(self, virtual: int, placement: Placement) -> Beside:
        ranks = np.array(sorted({0, min(1, self.p - 1), self.p - 1}))
        own = self._own(virtual, placement)[ranks]
        at = self._cut.of[virtual][own]
        in_layers, at_head = self._temporary[:, :, at].max(axis=-1).swapaxes(1, 2)
        weights = self._weights.of_ranks(at)
        states, gradients = self.splits.columns.states(weights, self.m)
        units = self.splits.columns.units(weights, self.m)
        received = received_bytes(own, self.p, self.units.hidden_bytes, self.m, self.splits.traits[0].pipeline.receives)
        return Beside(
            ranks,
            states,
            gradients,
            np.asarray(Peak.of(units, in_layers, at_head).total),
            units,
            received[:, None],
            self.stages.freed_bytes(self._cut.stages)[at].max(axis=-1)[:, None],
        )
