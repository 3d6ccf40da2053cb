"""The best layouts with no more layers recomputed than memory requires, stage by stage.

In the table all layers are recomputed or none. Here each stage recomputes only its first layers, as few as memory allows: the
first ranks of a pipeline hold more micro-batches than the last. Recomputing one layer less never makes a pass longer, so with
one stage per rank the fewest layers on every rank are also the fastest. With several stages per rank, those that hold the most
micro-batches recompute first; it is not proven that no other choice among them is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from ahp.forecast import memory
from ahp.plan import Parallelism
from ahp.schedule.orders import ranks_of_stages
from ahp.schedule.registry import PLAIN
from ahp.schedule.stages import layers_of_stages
from ahp.search.bounds.layer_bounds import Ways
from ahp.search.choices import RECOMPUTE, ScheduleChoice
from ahp.search.fewest import fewest, lowest_first
from ahp.search.pairs import Improved, Pair, by_time
from ahp.search.problem import Problem
from ahp.search.stages import WORTH_S
from ahp.words import WORTH_TELLING, number_of, percent

Fill = Callable[[Sequence[int]], tuple[int, ...]]
"""The recomputed layers of each stage, from a count for each rank, or for all stages."""

LAYOUTS = 4
"""How many layouts are tried, those that would be fastest without recompute: each costs some ten forecasts."""


def lighten(asked: Problem, rows: Improved) -> Improved:
    """Recompute as few layers as memory allows in the fastest layouts that recompute, unless the user has fixed what is recomputed."""
    if not is_open(asked):
        return rows
    ranked, found, forecasts, words = rows.ranked, list(rows.ranked), rows.lightened, dict(rows.words)
    for at in _promising(ranked):
        layout, all_of_them = ranked[at]
        lightest = _Fewest(asked, layout)
        better = lightest.found()
        forecasts += lightest.forecasts
        if better is None or better[1].step_time_s > all_of_them.step_time_s * (1 - WORTH_S):
            continue
        found[at] = better
        if (gain := all_of_them.step_time_s / better[1].step_time_s - 1) >= WORTH_TELLING:
            words[better[0]] = _words(better[0].recomputed_layers_per_stage or (), gain)
    return replace(rows, ranked=by_time(found), lightened=forecasts, words=words)


def _words(some: Sequence[int], gain: float) -> str:
    """A sentence on what a layout gains by recomputing only ``some`` layers of each stage."""
    faster = f"{percent(gain)} faster than with every layer recomputed"
    if len(some) == 1:
        return f"{number_of(some[0], 'layer')} {'is' if some[0] == 1 else 'are'} recomputed, as few as fit: {faster}"
    return f"{', '.join(map(str, some))} layers of the {len(some)} stages are recomputed, as few as fit: {faster}"


def _promising(ranked: list[Pair]) -> list[int]:
    """Positions in a ranking of the layouts that would be the fastest if they recomputed nothing."""

    def without_s(at: int) -> float:
        forecast = ranked[at][1]
        return forecast.step_time_s - forecast.step.get("recompute", 0.0)

    recompute = (at for at, (layout, _) in enumerate(ranked) if layout.activation_checkpoint != "none")
    return sorted((at for at in recompute if without_s(at) < ranked[0][1].step_time_s), key=without_s)[:LAYOUTS]


def is_open(asked: Problem) -> bool:
    """Whether the user has left it to the search what is recomputed."""
    return not {"activation_checkpoint", "recomputed_layers_per_stage"} & asked.constraints.given.keys()


def ways_of(asked: Problem) -> Ways | None:
    """Where the engine can recompute a part of the layers; None if it never can, or if the user has fixed what is recomputed."""

    @cache
    def can(pipeline: int, pipe: ScheduleChoice, kind: str) -> bool:
        layout = Parallelism(
            pipeline_parallel_degree=pipeline,
            pipeline_parallel_schedule=pipe.schedule,  # type: ignore[arg-type]
            virtual_stages_per_rank=pipe.virtual,
            activation_checkpoint=kind,  # type: ignore[arg-type]
            recomputed_layers_per_stage=(1,) * (pipeline * pipe.virtual),
        )
        return asked.refused(layout) is None

    some = is_open(asked) and any(can(1, ScheduleChoice(PLAIN, 1), kind) for kind in RECOMPUTE[1:])
    return can if some else None


class _Fewest:
    """The fewest recomputed layers of each stage of one layout such that every rank fits."""

    def __init__(self, asked: Problem, layout: Parallelism) -> None:
        self.asked, self.layout = asked, layout
        self.layers = layers_of_stages(layout, asked.graph.num_layers, ends=asked.stage_ends)
        self.forecasts = 0
        self._rank_of = ranks_of_stages(layout)

    def found(self) -> Pair | None:
        """The layout with a count per rank or, if the engine takes only one count for all stages, with that; None if it takes neither."""
        by_rank = np.bincount(self._rank_of, self.layers).astype(int).tolist()
        if self._runs(self._by_rank([0, *by_rank[1:]])):
            return self._least(self._by_rank, by_rank)
        alike = [min(self.layers)]
        return self._least(self._alike, alike) if self._runs(self._alike(alike)) else None

    def _runs(self, recomputed: tuple[int, ...]) -> bool:
        return self.asked.refused(self._with(recomputed)) is None

    def _by_rank(self, counts: Sequence[int]) -> tuple[int, ...]:
        return lowest_first(counts, self.layers, self._rank_of)

    def _alike(self, counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(counts) * len(self.layers)

    def _with(self, recomputed: tuple[int, ...]) -> Parallelism:
        return self.layout.model_copy(update={"recomputed_layers_per_stage": recomputed})

    def _least(self, fill: Fill, most: list[int]) -> Pair | None:
        """The layout with the fewest of each count, up to ``most``; None if that is 0 everywhere or does not fit. A count of 0 is tried
        separately: then nothing is made again for a backward pass."""

        def fits(counts: Sequence[int]) -> list[bool]:
            return self._fitting(fill(counts), len(most))

        ranges = [(0, 0) if fit else (1, count) for fit, count in zip(fits([0] * len(most)), most, strict=True)]
        counts = fewest(fits, *zip(*ranges, strict=True), step=max(most))
        if not any(counts):
            return None  # the layout that recomputes nothing is in the table
        layout = self._with(fill(counts))
        self.forecasts += 1
        forecast = self.asked.price_or_none(layout)
        return (layout, forecast) if forecast is not None and forecast.fits else None

    def _fitting(self, recomputed: tuple[int, ...], num_counts: int) -> list[bool]:
        """Whether each rank fits; for a single count for all stages, whether all do."""
        self.forecasts += 1
        needs = self.asked.pricer.needs(self._with(recomputed))
        fits = [memory.fit_probability(need, self.asked.capacity_bytes) >= memory.FIT_PROBABILITY for need in needs]
        return fits if num_counts == len(fits) else [all(fits)]
