"""Finds the order of actions on each rank with the least makespan: list schedules by many rules; the best are improved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import gt

from ahp.schedule.actions import Schedule
from ahp.schedule.makespan import makespan, peak_kept
from ahp.schedule.orders import SYNTHESIZED
from ahp.schedule.patterns import illegal, make, stage_ranks
from ahp.schedule.registry import PLAIN, SCHEDULES
from ahp.schedule.simulate import StageTimes, Timeline, simulate
from ahp.schedule.synthesis.bound import LowerBound, lower_bound
from ahp.schedule.synthesis.codes import as_schedule
from ahp.schedule.synthesis.problem import ROUNDING, Problem
from ahp.schedule.synthesis.search import Search


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


@dataclass(frozen=True)
class Synthesized:
    """A schedule that was found, how good it is, and how good it could be."""

    problem: Problem
    schedule: Schedule
    makespan_s: float
    bound: LowerBound
    """The time that no schedule can beat, and why."""
    fixed: Fixed | None
    """The best fixed pattern that fits; None where none does."""

    @property
    def gap(self) -> float:
        """The largest fraction of the makespan that any schedule could save."""
        return 1.0 - self.bound.seconds / self.makespan_s

    @property
    def gain(self) -> float | None:
        """Fraction saved of the best fixed pattern's time; None if no pattern fits."""
        return None if self.fixed is None else 1.0 - self.makespan_s / self.fixed.makespan_s

    @cached_property
    def timeline(self) -> Timeline:
        """Every action with its start and end."""
        return simulate(self.schedule, self.problem.times)


def synthesize(problem: Problem, *, seed: int = 0, effort: float = 1.0) -> Synthesized:
    """The best schedule that was found; the same for the same arguments.

    It fits in memory and is never slower than the best fixed pattern that fits. ``effort``: multiplies the number of tries.
    """
    bound, fixed = lower_bound(problem), best_fixed(problem)
    search = Search(problem, bound.seconds, seed, effort)
    near = fixed is not None and search.good(fixed.makespan_s)
    orders, makespan_s = ([], inf) if near else search.best()
    if fixed is None and (limit_s := one_f_one_b_s(problem)) < makespan_s:
        orders, makespan_s = search.better((orders, makespan_s), limit_s)
    if fixed is not None and fixed.makespan_s <= makespan_s:
        m, p = problem.num_micro_batches, problem.num_ranks
        schedule = replace(make(fixed.name, p, problem.num_stages // p, m), name=SYNTHESIZED)
        return Synthesized(problem, schedule, fixed.makespan_s, bound, fixed)
    schedule = as_schedule(SYNTHESIZED, orders, problem.stage_rank, problem.num_micro_batches)
    return Synthesized(problem, schedule, makespan_s, bound, fixed)


def one_f_one_b_s(problem: Problem) -> float:
    """Seconds of 1F1B with each rank's stages merged and all the memory that it needs: a V with split backwards can match it in half of that
    memory (arXiv 2405.15362). Infinite if backwards are whole, stages lie otherwise, or a rank has less than that half."""
    p, times = problem.num_ranks, problem.times
    v_shape = (*range(p), *reversed(range(p)))
    half = [p / 2 * least * (1 - ROUNDING) for least in problem.least_bytes]
    if not problem.split or problem.stage_rank != v_shape or any(map(gt, half, problem.memory_bytes)):
        return inf
    sums, longest = (
        ("forward_s", "backward_s", "first_forward_extra_s", "last_backward_extra_s"),
        ("send_forward_s", "send_backward_s"),
    )
    whole = [
        StageTimes(
            **{name: sum(getattr(times[s], name) for s in own) for name in sums},
            **{name: max(getattr(times[s], name) for s in own) for name in longest},
        )
        for own in problem.stages_of
    ]
    return makespan(PLAIN, p, 1, problem.num_micro_batches, whole).makespan_s
