"""Rows that nobody priced, or far behind, which may be the fastest under another cut into stages.

The longer the embedding and the head are beside a layer, the less the order of even cuts says of that of the best ones. So of the blocks with
the lowest bound of any cut each pipeline is looked at with the cut whose longest stage is shortest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ahp.plan import Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.exact import Place
from ahp.search.pairs import Pair
from ahp.search.problem import Problem
from ahp.search.recut import LayoutCosts, pipeline_of, recut_anyway, with_cut
from ahp.search.space import Space
from ahp.search.stages import Cut
from ahp.search.ties import TIED

BLOCKS = 16
"""So many blocks, those with the lowest bound of any cut."""

FORECASTS = 24
"""So many forecasts at most, in the order of a bound."""


@dataclass(frozen=True)
class UnevenRows:
    """Layouts with such a cut that fit, and what was tried for them."""

    pairs: list[Pair] = field(default_factory=list)
    places: dict[Parallelism, Place] = field(default_factory=dict)
    """Of the rows that they come from."""
    forecasts: int = 0


def uneven_rows(asked: Problem, bounds: Bounds, space: Space, ranked: Sequence[Pair]) -> UnevenRows:
    """Those that may be faster than the first of a ranking by more than the forecast can tell apart, but for pipelines that are cut anyway;
    none where the user has fixed the cut."""
    if asked.constraints.layers_per_stage is not None:
        return UnevenRows()
    limit_s, known = ranked[0][1].step_time_s * (1 - TIED), recut_anyway(asked, ranked)
    some: list[tuple[float, Place, Parallelism, Cut]] = []
    for place, even_s in _rows(bounds, space, limit_s):
        row = space.layout(*place)
        if pipeline_of(asked, row) in known or row.num_stages > asked.graph.num_layers:
            continue
        costs = LayoutCosts(asked, row)
        # A cut takes off about what the longest stage loses.
        if max(costs.floor_s(), even_s * costs.shorter()) < limit_s:
            cut = costs.longest[1]
            some.append((costs.bounds_s([cut])[0], place, row, cut))
    pairs: list[Pair] = []
    places: dict[Parallelism, Place] = {}
    forecasts = 0
    for bound_s, place, row, cut in sorted(some, key=lambda one: one[:2])[:FORECASTS]:
        if bound_s >= limit_s:
            break
        forecast, forecasts = with_cut(asked, row, cut), forecasts + 1
        if forecast is not None:
            pairs.append((row.model_copy(update={"layers_per_stage": cut}), forecast))
            places[row] = place
            limit_s = min(limit_s, forecast.step_time_s * (1 - TIED))
    return UnevenRows(pairs, places, forecasts)


def _rows(bounds: Bounds, space: Space, limit_s: float) -> Iterator[tuple[Place, float]]:
    """Of each pipeline of the lowest blocks the row with the lowest bound that fits as it is, or the one that needs the least memory; with the bound."""
    most_bytes = bounds.most_that_fits_bytes()
    for block in bounds.lowest_of_any_cut(limit_s)[:BLOCKS]:
        shape = space.rows(block).shape
        of = bounds.rows(block, np.inf)
        times_s, needs = (each.reshape(shape) for each in (of.times_s, of.needs_bytes))
        for pipe in range(shape[1]):
            fits = needs[:, pipe] <= most_bytes
            best = np.where(fits, times_s[:, pipe], np.inf).argmin() if fits.any() else needs[:, pipe].argmin()
            split, kind = np.unravel_index(int(best), fits.shape)
            yield (block, int(np.ravel_multi_index((split, pipe, kind), shape))), float(times_s[split, pipe, kind])
