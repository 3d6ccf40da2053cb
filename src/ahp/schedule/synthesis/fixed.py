"""The fixed patterns that suit a problem: a schedule that is found must not be slower than them."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.schedule.makespan import makespan, peak_kept
from ahp.schedule.patterns import illegal, stage_ranks
from ahp.schedule.registry import SCHEDULES
from ahp.schedule.synthesis.problem import ROUNDING, Problem


@dataclass(frozen=True)
class Fixed:
    """A fixed pattern that fits, and when it ends."""

    name: str
    makespan_s: float


def best_fixed(problem: Problem) -> Fixed | None:
    """The fastest pattern with the problem's placement of stages that fits into every rank's memory; None if there is none."""
    p, m = problem.num_ranks, problem.num_micro_batches
    v, uneven = divmod(problem.num_stages, p)
    if uneven:
        return None
    found = []
    for name, schedule in SCHEDULES.items():
        if schedule.splits_backward and not problem.split:
            continue
        if illegal(name, p, v, m) or stage_ranks(name, p, v) != problem.stage_rank:
            continue
        peaks = peak_kept(name, p, v, m, problem.kept_bytes, problem.freed_bytes)
        if all(peak <= memory * (1 + ROUNDING) for peak, memory in zip(peaks, problem.memory_bytes, strict=True)):
            found.append(Fixed(name, makespan(name, p, v, m, problem.times).makespan_s))
    return min(found, key=lambda fixed: fixed.makespan_s, default=None)
