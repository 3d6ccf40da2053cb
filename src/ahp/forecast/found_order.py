"""A schedule made for a layout's own stages: their seconds, what they keep, and the memory that each rank has left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ahp.errors import AhpError
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.priced import Priced
from ahp.forecast.pricer import Pricer
from ahp.plan import Parallelism
from ahp.schedule.orders import SYNTHESIZED, order_text, ranks_of_stages
from ahp.schedule.synthesis.find import Synthesized, synthesize
from ahp.schedule.synthesis.problem import Problem
from ahp.words import percent

LESS_MEMORY = (1.0, 0.95, 0.9)
"""Parts of what ranks have left that are tried, until the layout fits: what a rank keeps beside activations may grow with them."""


@dataclass(frozen=True)
class FoundOrder:
    """A layout with a schedule that was found for it, priced, beside the layout that it was found for."""

    priced: Priced
    before: Priced
    found: Synthesized

    @property
    def gain(self) -> float:
        """Part of the step that it saves."""
        return 1.0 - self.priced.forecast.step_time_s / self.before.forecast.step_time_s

    def words(self) -> str:
        """One line for people: what it gains, and how near it is to the best there can be."""
        before, gap = self.before.parallelism.pipeline_parallel_schedule, max(0.0, self.found.gap)
        return (
            f"a schedule made for these stages takes {percent(self.gain)} less of a step than {before}; none could take "
            f"{percent(gap)} less than it ({self.found.bound.reason})"
        )


def found_order(
    pricer: Pricer | MixedPricer, parallelism: Parallelism, *, seed: int = 0, effort: float = 1.0
) -> FoundOrder | None:
    """The layout with the best schedule that is found for it; None where none is faster and fits, or the layout has no pipeline.

    Raises what ``price`` raises for the layout itself.
    """
    before = pricer.price(parallelism)
    layout = before.parallelism
    if layout.pipeline_parallel_degree == 1 or len({replica.span.m for replica in before.replicas}) > 1:
        return None
    best = None
    for split in (True, False):
        try:
            one = _fitting(pricer.price, before, pricer.activation_bytes(before), split, seed, effort)
        except AhpError:  # its engine computes whole backwards alone, or runs no order of ours
            continue
        if one is not None and (best is None or one.gain > best.gain):
            best = one
    return best if best is not None and best.gain > 0.0 else None


def _fitting(
    price: Callable[[Parallelism], Priced], before: Priced, rooms: np.ndarray, split: bool, seed: int, effort: float
) -> FoundOrder | None:
    for part in LESS_MEMORY:
        try:
            found = synthesize(_problem(before, part * rooms, split), seed=seed, effort=effort)
        except ValueError:  # not one micro-batch fits
            return None
        order = order_text(found.schedule)
        keys = {"pipeline_parallel_schedule": SYNTHESIZED, "pipeline_parallel_order": order}
        priced = price(before.parallelism.model_copy(update=keys))
        if priced.forecast.fits or not before.forecast.fits:
            return FoundOrder(priced, before, found)
    return None


def _problem(before: Priced, rooms: np.ndarray, split: bool) -> Problem:
    """``rooms``: bytes that each rank has for activations."""
    last = 6 if split else 5
    times = [
        replace(one, last_backward_extra_s=cost.seconds[last])
        for one, cost in zip(before.span.times, before.stages, strict=True)
    ]
    return Problem(
        tuple(times),
        ranks_of_stages(before.parallelism),
        before.span.m,
        tuple(map(float, before.memory.kept.tolist())),
        memory_bytes=tuple(map(float, rooms)),
        split=split,
    )
