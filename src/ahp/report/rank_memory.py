"""The memory of every rank against that of its own device."""

from __future__ import annotations

from collections.abc import Sequence

from ahp.forecast.memory import PlaceMemory
from ahp.plan import Forecast
from ahp.report.bars import bars_of
from ahp.report.html_parts import note
from ahp.words import gib, of_gib

MOST_ROWS = 64
"""[Empirical] Most places that are drawn: the fullest, if there are more."""
MOST_NAMED = 3
"""Most ranks that a row names if the ranks that it stands for are not consecutive."""


def picture(forecast: Forecast, places: Sequence[PlaceMemory]) -> str:
    """A bar for the ranks at each place of the pipeline, as long as the used share of their device's memory."""
    shown = places
    if len(places) > MOST_ROWS:
        fullest = sorted(places, key=lambda place: -place.memory.total / place.capacity_bytes)[:MOST_ROWS]
        shown = [place for place in places if place in fullest]
    several = len({place.device for place in places}) > 1
    rows = (
        (
            rank_words(place.ranks) + (f", {place.device}" if several else ""),
            place.memory.parts,
            float(place.capacity_bytes),
            of_gib(place.memory.total, place.capacity_bytes),
        )
        for place in shown
    )
    left = len(places) - len(shown)
    more = f" The {left} emptiest of {len(places)} places are not drawn." if left else ""
    words = f"A bar's full width is its device's memory; the figures are those of the fullest, rank {forecast.fullest_rank}.{more}"
    return bars_of(rows, gib, forecast.memory) + note(words)


def of_fullest(forecast: Forecast, capacity_bytes: int | None) -> str:
    """The fullest rank alone, if nothing is known about the others."""
    used = forecast.needed_bytes
    words = of_gib(used, capacity_bytes) if capacity_bytes else gib(used)
    row = f"rank {forecast.fullest_rank}", forecast.memory, float(capacity_bytes or used), words
    return bars_of([row], gib, forecast.memory) + note("The fullest rank.")


def rank_words(ranks: Sequence[int]) -> str:
    """``ranks 0 to 7``; if they are not consecutive, the numbers, of many ranks only the first and the last."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) <= MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[: MOST_NAMED - 1]))} .. {ranks[-1]} ({len(ranks)})"
