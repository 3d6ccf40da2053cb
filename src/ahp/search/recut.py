"""Better cuts into stages than even ones, for the best layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ahp.plan import Forecast, Parallelism
from ahp.schedule.registry import SCHEDULES, get
from ahp.search.pairs import Improved, Pair, by_time
from ahp.search.problem import Problem
from ahp.search.stages import WORTH_S, BestCut, LayoutCosts, best_cut, with_cut
from ahp.words import WORTH_TELLING, percent

PIPELINES = 4
"""How many different pipelines, the fastest ones, have their fastest layout cut again: each costs up to some hundred forecasts."""

ALIKE = 3
"""How many more layouts with each of these pipelines get its cut, if they are faster with it: one forecast each."""


def recut(asked: Problem, rows: Improved) -> Improved:
    """Cut the fastest layouts with a pipeline again, unless the user has fixed the cut. Some may have a cut already."""
    if asked.constraints.layers_per_stage is not None:
        return rows
    ranked, found, forecasts = rows.ranked, list(rows.ranked), rows.cuts
    more = list[Pair]()
    for first, *alike in _pipelines(asked, ranked):
        better = _cut(asked, ranked[first][0])
        if better is None:
            continue
        forecasts += better.forecasts + len(alike)
        cuts = {first: better.forecast, **{at: with_cut(asked, ranked[at][0], better.layers) for at in alike}}
        for at, forecast in cuts.items():
            layout, before = ranked[at]
            if forecast is not None and forecast.step_time_s <= before.step_time_s * (1 - WORTH_S):
                found[at] = layout.model_copy(update={"layers_per_stage": better.layers}), forecast
        others = _under_other_schedules(asked, *found[first])
        forecasts += len(others)
        more += [(layout, forecast) for layout, forecast in others if forecast is not None]
    found = by_time(dict([*found, *more]).items())
    return replace(rows, ranked=found, cuts=forecasts, words=rows.words | _words(asked, found))


def _words(asked: Problem, ranked: list[Pair]) -> dict[Parallelism, str]:
    """A sentence on what the cut of each layout gains, where it gains enough."""
    cuts = ((pair, pair[0].layers_per_stage) for pair in ranked)
    found = ((pair[0], cut_words(cut, _gain(asked, *pair))) for pair, cut in cuts if cut is not None)
    return {layout: sentence for layout, sentence in found if sentence is not None}


def cut_words(layers: Sequence[int], gain: float | None) -> str | None:
    """A sentence on a cut that is faster than even stages by this share, None = these do not fit; None where the gain is too small to tell."""
    stages = f"stages of {', '.join(map(str, layers))} layers"
    if gain is None:
        return f"{stages}: evenly cut stages do not fit"
    return f"{stages}: {percent(gain)} faster than evenly cut stages" if gain >= WORTH_TELLING else None


def _under_other_schedules(
    asked: Problem, layout: Parallelism, before: Forecast
) -> list[tuple[Parallelism, Forecast | None]]:
    """A layout with an uneven cut under each other schedule that lays the stages on the same ranks; the forecast is None if it is no faster or
    does not fit. Such a schedule may not fit with even stages, and then has no row that could be cut again."""
    if layout.layers_per_stage is None or asked.constraints.pipeline_parallel_schedule is not None:
        return []
    shape = layout.pipeline_parallel_degree, layout.virtual_stages_per_rank
    own = get(layout.pipeline_parallel_schedule)
    others = (
        layout.model_copy(update={"pipeline_parallel_schedule": schedule.name})
        for schedule in SCHEDULES.values()
        if schedule is not own and schedule.placement.stage_ranks(*shape) == own.placement.stage_ranks(*shape)
        if not schedule.illegal(*shape, layout.num_micro_batches(asked.job), in_torch=asked.torch_orders)
    )
    found = ((other, with_cut(asked, other, layout.layers_per_stage)) for other in others if asked.offers(other))
    return [(other, f if f and f.step_time_s <= before.step_time_s * (1 - WORTH_S) else None) for other, f in found]


def _gain(asked: Problem, layout: Parallelism, forecast: Forecast) -> float | None:
    """By what share a cut is faster than even stages; None if even stages do not fit, 0 if they cannot run."""
    even = asked.price_or_none(layout.model_copy(update={"layers_per_stage": None}))
    if even is None:
        return 0.0
    return even.step_time_s / forecast.step_time_s - 1 if even.fits else None


def pipeline_of(asked: Problem, of: Parallelism) -> tuple[object, ...]:
    """The keys that decide the best cut of a layout: it hardly depends on the rest."""
    pipeline = of.pipeline_parallel_schedule, of.pipeline_parallel_degree, of.virtual_stages_per_rank
    return (*pipeline, of.num_micro_batches(asked.job))


def recut_anyway(asked: Problem, ranked: Sequence[Pair]) -> set[tuple[object, ...]]:
    """The pipelines of a ranking that get a cut of their own."""
    return {pipeline_of(asked, ranked[first][0]) for first, *_ in _pipelines(asked, ranked)}


def _pipelines(asked: Problem, ranked: Sequence[Pair]) -> list[list[int]]:
    """Positions in a ranking of the layouts with each of the fastest pipelines."""
    found: dict[object, list[int]] = {}
    for at, (of, _) in enumerate(ranked):
        if of.num_stages > 1:
            found.setdefault(pipeline_of(asked, of), []).append(at)
    return [places[: 1 + ALIKE] for places in list(found.values())[:PIPELINES]]


def _cut(asked: Problem, layout: Parallelism) -> BestCut | None:
    costs = LayoutCosts(asked, layout)
    stages, layers = layout.num_stages, asked.graph.num_layers
    if stages > layers:  # the only cut has empty ends
        return None
    # An engine's own cut may leave an end without a layer, which layers_per_stage cannot express.
    starts = [cut for cut in (costs.usual(), costs.longest[1]) if min(cut) > 0]
    return best_cut(layers, stages, costs, starts)
