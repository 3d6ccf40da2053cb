"""What runs beside the computation, on each rank's communication stream, when the computation ends: gradients are reduced."""

from __future__ import annotations

from ahp.schedule.synthesis.problem import Problem


def reduced_ends_s(problem: Problem, done_s: list[float]) -> list[float]:
    """When each stage's gradients are reduced: each rank reduces them one stage after the other, as they are done."""
    ends = list(done_s)
    for own in problem.stages_of:
        now = 0.0
        for stage in sorted(own, key=lambda s: done_s[s]):
            if problem.reduce_s[stage]:
                now = ends[stage] = max(now, done_s[stage]) + problem.reduce_s[stage]
    return ends
