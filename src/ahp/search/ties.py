"""Ties: of layouts that the forecast cannot tell apart, the simplest comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ahp.plan import Parallelism
from ahp.schedule.orders import splits_backward
from ahp.search.pairs import Pair
from ahp.words import WORTH_TELLING, percent

TIED = 0.02
"""Share of the step by which a layout may be forecast slower than the fastest and still be tied with it. Of 381 pairs of layouts
that one source measured with the same model, devices and batch and that are forecast less than 2 % apart, 54 % are in the
right order; of 124 that are 2 to 3 % apart, 66 % (docs/accuracy.md, What the order can tell apart)."""


def complexity(layout: Parallelism) -> tuple[int, ...]:
    """What makes a layout harder to run and to understand, the heaviest first: the layout with the least tuple is the simplest."""
    axes = len(layout.axes) + (layout.expert_parallel_degree > 1)
    splits = splits_backward(layout)
    uneven = layout.layers_per_stage is not None or layout.stages is not None
    some = layout.recomputed_layers() is not None
    return (
        axes,
        int(layout.pipeline_parallel_degree > 1),
        layout.zero_stage,
        int(splits) + int(layout.virtual_stages_per_rank > 1),
        int(uneven) + int(some) + int(layout.mesh_order is not None) + int(layout.has_unlike_widths),
    )


@dataclass(frozen=True)
class Ordered:
    """Layouts as they are shown: the simplest of the tied ones, then the others by their time."""

    ranked: list[Pair]
    fastest: Pair
    num_tied: int
    """Number of layouts tied with the fastest, including itself."""

    @property
    def first_is_fastest(self) -> bool:
        return self.ranked[0] is self.fastest

    def title(self) -> str:
        """What the first layout is."""
        if self.first_is_fastest:
            return "fastest of the layouts that fit"
        return f"simplest of the {self.num_tied} layouts that are tied with the fastest"

    def words(self) -> tuple[str, ...]:
        """Why the first layout leads although it is not the fastest; nothing if it is."""
        if self.first_is_fastest:
            return ()
        faster = 1.0 - self.fastest[1].step_time_s / self.ranked[0][1].step_time_s
        by = f"is {percent(faster)} faster by the forecast" if faster >= WORTH_TELLING else "takes as long"
        tied = f"tied with {self.fastest[0].short()}, which {by}: of layouts less than {100 * TIED:.0f} % apart"
        return (f"{tied} the forecast cannot say which is faster, and the simplest comes first",)


def simplest_first(ranked: Sequence[Pair], within: float) -> Ordered:
    """Put the simplest of the layouts whose time is within a share of the fastest's in front.

    Args:
        ranked: layouts with their forecasts, fastest first; at least one.
        within: that share; 0 leaves the fastest in front.
    """
    limit_s = ranked[0][1].step_time_s * (1.0 + within)
    tied = [pair for pair in ranked if pair[1].step_time_s <= limit_s] if within else [ranked[0]]
    first = min(tied, key=lambda pair: (complexity(pair[0]), pair[1].step_time_s))
    return Ordered([first, *(pair for pair in ranked if pair is not first)], ranked[0], len(tied))
