"""What the best plan would be on slightly better hardware: one piece improved at a time, and searched again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ahp.cluster.better import better_clusters
from ahp.plan import Parallelism
from ahp.search.fastest import fastest
from ahp.search.lighten import lighten
from ahp.search.pairs import Improved, Pair
from ahp.search.problem import Problem
from ahp.search.reasons import TIE
from ahp.words import WORTH_TELLING, percent, seconds


@dataclass(frozen=True)
class Move:
    """One piece of hardware improved."""

    change: str
    layout: Parallelism
    """The best layout there."""
    step_time_s: float
    gain: float
    """Share of today's step that is saved."""
    stays: bool
    """Whether the layout is today's."""

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        layout = self.layout.model_dump(mode="json")
        return {"change": self.change, "parallelism": layout, "step_time_s": self.step_time_s, "gain": self.gain,
                "layout_stays": self.stays}  # fmt: skip

    def words(self) -> str:
        """One line for people."""
        if self.stays and abs(self.gain) < WORTH_TELLING:
            return f"{self.change}: changes nothing"
        then = "the layout stays" if self.stays else f"the best is then {self.layout.short()}"
        return f"{self.change}: {seconds(self.step_time_s)} a step, {percent(self.gain)} less; {then}"


def sensitivity(
    asked: Problem, layout: Parallelism, during: Callable[[str], AbstractContextManager[Any]] = nullcontext
) -> list[Move]:
    """The best layout with 10 % more (``better.MORE``) of each piece of hardware, the most useful first.

    ``layout`` is a candidate everywhere, so that choices outside the search (its cut into stages) cannot make better
    hardware look worse. ``during``: gets what is searched and is entered meanwhile, for progress: on mixed clusters a search takes a minute.
    """
    today_s = asked.price(layout).step_time_s
    found = []
    for change, cluster in better_clusters(asked.cluster):
        there = asked.on(cluster)
        kept = there.price_or_none(layout)
        # Of two layouts as fast as each other the present one stays: so search only for one that is faster by more.
        ceiling_s = float("inf") if kept is None else kept.step_time_s * (1 - TIE)
        with during(f"searching with {change}"):
            searched = fastest(there, ceiling_s, layout)
        pairs = [] if kept is None else [(layout, kept), *_lighter(there, layout)]
        pairs += [searched.best] if searched is not None and searched.best is not None else []
        best = min(pairs, key=lambda pair: pair[1].step_time_s * (1 - TIE * (pair[0] == layout)))
        gain = 1 - best[1].step_time_s / today_s
        found.append(Move(change, best[0], best[1].step_time_s, gain, best[0] == layout))
    return sorted(found, key=lambda move: move.step_time_s)


def _lighter(there: Problem, layout: Parallelism) -> list[Pair]:
    """The layout with as few layers recomputed as fit there; the search misses it, as its row recomputes all and takes longer than the
    ceiling."""
    if layout.activation_checkpoint == "none" or there.cluster.is_mixed:
        return []
    every = layout.model_copy(update={"recomputed_layers_per_stage": None})
    whole = there.price_or_none(every)
    lighter = [] if whole is None else lighten(there, Improved([(every, whole)])).ranked
    return [pair for pair in lighter if pair[1].fits]
