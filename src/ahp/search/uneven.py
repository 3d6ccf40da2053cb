"""Rows that were not priced, or that are far behind, but may be the fastest under another cut into stages.

The longer the embedding and the head are compared with a layer, the less the ranking under even cuts says about the ranking under the best cuts.
So in the blocks with the lowest bound of any cut, each pipeline is tried with the cut whose longest stage is shortest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ahp.plan import Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.exact import Place
from ahp.search.pairs import Improved, by_time
from ahp.search.problem import Problem
from ahp.search.recut import pipeline_of, recut_anyway
from ahp.search.stages import Cut, LayoutCosts, with_cut
from ahp.search.ties import TIED

BLOCKS = 32
"""How many blocks are tried: those with the lowest bound of any cut."""

FORECASTS = 24
"""Most forecasts, made in the order of a bound."""


def with_uneven_rows(asked: Problem, bounds: Bounds, rows: Improved) -> Improved:
    """The rows, and those with an uneven cut that may be faster than the first by more than the forecast can tell apart, except for pipelines
    that are recut anyway; none if the user has fixed the cut."""
    if asked.constraints.layers_per_stage is not None:
        return rows
    limit_s, known = rows.ranked[0][1].step_time_s * (1 - TIED), recut_anyway(asked, rows.ranked)
    some: list[tuple[float, Place, Parallelism, Cut]] = []
    for place, even_s in _rows(bounds, limit_s):
        row = bounds.space.layout(*place)
        if pipeline_of(asked, row) in known or row.num_stages > asked.graph.num_layers:
            continue
        costs = LayoutCosts(asked, row)
        # A cut shortens the step by about the same factor as the longest stage.
        if max(costs.floor_s(), even_s * costs.shorter()) < limit_s:
            cut = costs.longest[1]
            some.append((costs.bounds_s([cut])[0], place, row, cut))
    pairs, places, forecasts = list(rows.ranked), dict(rows.places), rows.cuts
    for bound_s, place, row, cut in sorted(some, key=lambda one: one[:2])[:FORECASTS]:
        if bound_s >= limit_s:
            break
        forecast, forecasts = with_cut(asked, row, cut), forecasts + 1
        if forecast is not None:
            pairs.append((row.model_copy(update={"layers_per_stage": cut}), forecast))
            places[row] = place
            limit_s = min(limit_s, forecast.step_time_s * (1 - TIED))
    return replace(rows, ranked=by_time(pairs), places=places, cuts=forecasts)


def _rows(bounds: Bounds, limit_s: float) -> Iterator[tuple[Place, float]]:
    """For each pipeline of the lowest blocks, the fitting row with the lowest bound, else the row that needs the least memory; with its bound."""
    most_bytes = bounds.most_that_fits_bytes()
    for block in bounds.lowest_of_any_cut(limit_s)[:BLOCKS]:
        shape = bounds.space.rows(block).shape
        of = bounds.rows(block, np.inf)
        times_s, needs = (each.reshape(shape) for each in (of.times_s, of.needs_bytes))
        for pipe in range(shape[1]):
            fits = needs[:, pipe] <= most_bytes
            best = np.where(fits, times_s[:, pipe], np.inf).argmin() if fits.any() else needs[:, pipe].argmin()
            split, kind = np.unravel_index(int(best), fits.shape)
            yield (block, int(np.ravel_multi_index((split, pipe, kind), shape))), float(times_s[split, pipe, kind])
