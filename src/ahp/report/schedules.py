"""A plan's schedule compared with another: one made for its stages with the best fixed pattern, or a pattern with one made for its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ahp.errors import AhpError
from ahp.forecast.found_order import ToOrder
from ahp.forecast.priced import Priced
from ahp.plan import Parallelism
from ahp.schedule.drawing import drawing
from ahp.schedule.orders import SYNTHESIZED
from ahp.schedule.registry import SCHEDULES
from ahp.schedule.simulate import Timeline
from ahp.words import compared

if TYPE_CHECKING:
    from ahp.forecast.mixed import MixedPricer
    from ahp.forecast.pricer import Pricer

RANKS = 16
"""How many pipeline ranks, the first ones, are drawn as text."""

WORTH = 0.02
"""The least share of bubble in a step for which another schedule is searched."""


@dataclass(frozen=True)
class ComparedSchedules:
    """What the schedule made for the stages gains, and the timelines: the fixed pattern first, if there is one."""

    words: str
    timelines: dict[str, Timeline]

    def drawings(self) -> dict[str, list[str]]:
        """Each timeline as lines of text, all on the same time scale."""
        whole_s = max(timeline.makespan_s for timeline in self.timelines.values())
        return {name: drawing(timeline, whole_s=whole_s)[:RANKS] for name, timeline in self.timelines.items()}

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return {"words": self.words, "drawings": self.drawings()}


def compared_schedules(pricer: Pricer | MixedPricer, layout: Parallelism) -> ComparedSchedules | None:
    """The comparison; None without a pipeline, for a pattern that hardly waits, and if no order can be found (another engine's).

    Raises what ``price`` raises for the layout itself.
    """
    if layout.pipeline_parallel_degree == 1:
        return None
    if layout.pipeline_parallel_schedule == SYNTHESIZED:
        return _beside_pattern(pricer, layout)
    to_order = ToOrder.of(pricer, layout)
    if to_order is None or _bubble(to_order.before) < WORTH or (found := to_order.found()) is None:
        return None
    return _compared(found.words(), found.before, found.priced)


def _beside_pattern(pricer: Pricer | MixedPricer, layout: Parallelism) -> ComparedSchedules:
    own, best = pricer.price(layout), best_pattern(pricer, layout)
    if best is None:
        return _compared("made for these stages; no fixed pattern fits", own)
    saved = 1 - own.forecast.step_time_s / best.forecast.step_time_s
    pattern = f"{_name(best)}, the best fixed pattern that fits"
    change = compared(saved, "of a step less than", "of a step more than", "as fast as")
    return _compared(f"made for these stages: {change} {pattern}", best, own)


def best_pattern(pricer: Pricer | MixedPricer, layout: Parallelism) -> Priced | None:
    """The layout under the fastest fixed pattern that fits, with the same number of stages per rank."""
    priced = []
    for name in SCHEDULES:
        keys = {"pipeline_parallel_schedule": name, "pipeline_parallel_order": None}
        try:
            one = pricer.price(layout.model_copy(update=keys))
        except AhpError:  # it needs other numbers of stages or micro-batches
            continue
        if one.forecast.fits:
            priced.append(one)
    return min(priced, key=lambda one: one.forecast.step_time_s, default=None)


def compared_with_pattern(pricer: Pricer | MixedPricer, layout: Parallelism) -> ComparedSchedules | None:
    """A layout's own schedule next to the best fixed pattern; None if it has no schedule of its own."""
    if layout.pipeline_parallel_schedule != SYNTHESIZED or layout.pipeline_parallel_degree == 1:
        return None
    return _beside_pattern(pricer, layout)


def _compared(words: str, *several: Priced) -> ComparedSchedules:
    return ComparedSchedules(words, {_name(one): one.timeline for one in several})


def _name(priced: Priced) -> str:
    return priced.parallelism.pipeline_parallel_schedule


def _bubble(priced: Priced) -> float:
    return priced.forecast.step.get("bubble", 0.0) / priced.forecast.step_time_s
