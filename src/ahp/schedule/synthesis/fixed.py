"""The fixed patterns that a problem has: what a schedule that is found must not be slower than."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.schedule.makespan import makespan, peak_kept
from ahp.schedule.patterns import illegal, make, stage_ranks
from ahp.schedule.registry import SCHEDULES
from ahp.schedule.synthesis.codes import as_orders
from ahp.schedule.synthesis.problem import ROUNDING, Problem
from ahp.schedule.synthesis.replay import replay


@dataclass(frozen=True)
class Fixed:
    """A fixed pattern that fits, and when it ends."""

    name: str
    makespan_s: float


def best_fixed(problem: Problem) -> Fixed | None:
    """The fastest pattern whose stages lie as the problem's and that fits into every rank's memory; None if there is none."""
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
            found.append(Fixed(name, _makespan_s(problem, name, p, v, m)))
    return min(found, key=lambda fixed: fixed.makespan_s, default=None)


def _makespan_s(problem: Problem, name: str, p: int, v: int, m: int) -> float:
    if any(t.gathered_s for t in problem.times):
        return replay(problem, as_orders(make(name, p, v, m))).end_s
    return makespan(name, p, v, m, problem.times).makespan_s
