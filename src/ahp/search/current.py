"""The layout that the user runs today, compared with the winner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ahp.errors import BadInput, NotExpressible
from ahp.plan import Forecast, Parallelism, Rejected, validated
from ahp.search import reasons
from ahp.search.pairs import Pair, by_time
from ahp.search.problem import Problem
from ahp.words import seconds


@dataclass(frozen=True)
class Current:
    """Today's layout with its forecast, which is None if the layout cannot run here at all."""

    parallelism: Parallelism
    forecast: Forecast | None
    against_best: str
    """The one reason why it lost, or that it did not."""

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return {
            "parallelism": self.parallelism.model_dump(mode="json"),
            "forecast": None if self.forecast is None else self.forecast.model_dump(mode="json"),
            "against_best": self.against_best,
        }

    def lost(self) -> Rejected:
        """The form in which plan.yaml keeps it."""
        if self.forecast is None:
            return Rejected(parallelism=self.parallelism, reason=self.against_best)
        return Rejected.of(self.parallelism, self.forecast, self.against_best)

    def words(self) -> str:
        """One line for people."""
        took = "" if self.forecast is None else f"{seconds(self.forecast.step_time_s)} a step, "
        return f"{self.parallelism.short()}: {took}{self.against_best}"


def today_of(used: Problem, layout: Parallelism | Mapping[str, Any] | None) -> Current | None:
    """The layout with its forecast on the devices that are used. Raises BadInput if it is no valid layout at all."""
    if layout is None:
        return None
    given = validated(Parallelism, layout, "current")
    try:
        priced = used.priced(given)
    except (BadInput, NotExpressible) as refusal:
        return Current(given, None, f"cannot run: {refusal}")
    return Current(priced.parallelism, priced.forecast, "")


def with_candidate(ranked: list[Pair], today: Current | None, used: Problem) -> list[Pair]:
    """The ranking with today's layout in its place, if it fits and agrees with what is fixed: the search may not have it,
    for example if its stages are uneven."""
    if today is None or today.forecast is None or not today.forecast.fits:
        return ranked
    if not used.constraints.admits(today.parallelism):
        return ranked
    alike = used.first_alike(today.parallelism)
    if any(used.decided(layout) in (today.parallelism, alike) for layout, _ in ranked):
        return ranked
    return by_time([*ranked, (today.parallelism, today.forecast)])


def compared(today: Current, best: Pair, used: Problem) -> Current:
    """Today's layout with the reason why it lost."""
    if today.forecast is None:
        return today
    if used.decided(best[0]) in (today.parallelism, used.first_alike(today.parallelism)):
        return replace(today, against_best="it is the best")
    if not today.forecast.fits:
        return replace(today, against_best=reasons.does_not_fit(today.forecast, used.capacity_bytes))
    return replace(today, against_best=reasons.slower_because(today.forecast, best[1]))
