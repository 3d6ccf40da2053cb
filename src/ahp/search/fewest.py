"""The fewest layers that stages recompute such that every pipeline rank fits, by the forecast's own memory.

Recomputing one layer less never makes a pass longer, and with one stage per rank what a rank keeps depends only on its own
number. So the fewest for every rank are the fastest choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ahp.plan import Parallelism


def fewest(
    fits: Callable[[Sequence[int]], Sequence[bool]], at_least: Sequence[int], at_most: Sequence[int], step: int = 0
) -> tuple[int, ...]:
    """The least number for each pipeline rank, between its bounds, with which it fits, or the upper bound.

    ``fits``: whether each rank fits, from a number for each. All ranks are looked at together: first ``step`` above their lower bounds,
    which can be close, then in steps that double, up to half the interval.
    """
    low, high = list(at_least), list(at_most)
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [a + min(step, (b - a) // 2) for a, b in zip(low, high, strict=True)]
        for at, fit in enumerate(fits(middle)):
            if low[at] < high[at]:
                low[at], high[at] = (low[at], middle[at]) if fit else (middle[at] + 1, high[at])
        step = max(1, 2 * step)
    return tuple(high)


def said_plainly(layout: Parallelism) -> Parallelism:
    """The same layout, without numbers where all layers are recomputed or none is."""
    replicas, stages = layout.data_parallel_replicate_degree, layout.stages or ()
    counts = [stage.recomputed(replicas) for stage in stages]
    none = not any(map(any, counts))
    if not none and any(set(some) != {stage.layers} for stage, some in zip(stages, counts, strict=True)):
        return layout
    return with_all(layout).model_copy(update={"activation_checkpoint": "none"} if none else {})


def with_all(layout: Parallelism) -> Parallelism:
    """The layout without numbers: every layer of its ``stages`` is recomputed, if any is."""
    stages = tuple(stage.model_copy(update={"recomputed_layers": None}) for stage in layout.stages or ())
    return layout.model_copy(update={"stages": stages})


def lowest_first(counts: Sequence[int], layers: Sequence[int], rank_of: Sequence[int]) -> tuple[int, ...]:
    """The count of each stage: a rank's count goes to its lowest stages first, which hold the most micro-batches."""
    left, found = list(counts), []
    for most, rank in zip(layers, rank_of, strict=True):
        found.append(min(most, left[rank]))
        left[rank] -= found[-1]
    return tuple(found)
