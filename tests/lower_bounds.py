"""The lower bound of one layout's schedule, where the search asks for those of many."""

from __future__ import annotations

from collections.abc import Sequence

from ahp.schedule.bounds import TimeColumns, lower_bounds_s
from ahp.schedule.simulate import StageTimes


def lower_bound_s(name: str, p: int, v: int, m: int, times: Sequence[StageTimes]) -> float:
    """``times[s]`` belongs to stage ``s``."""
    return float(lower_bounds_s(name, p, v, m, TimeColumns.of(times))[0])
