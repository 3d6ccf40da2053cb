"""Whether the batch is too small for the devices: what the same layout would reach with a larger one."""

from __future__ import annotations

from dataclasses import replace

from ahp.errors import BadInput, NotExpressible
from ahp.job import MOST_SEQUENCES
from ahp.plan import Plan
from ahp.schedule.orders import under_pattern
from ahp.search.problem import Problem
from ahp.words import WORTH_TELLING, percent

TIMES = (2, 4, 8, 16)
"""Larger batches that are priced, each one forecast of the layout that was found."""

WORTH_SAYING = 1.25
"""A batch is small if a larger one raises the share of the peak by this factor."""

MOST_OF_IT = 0.9
"""The batch that is named reaches this share of what the best of ``TIMES`` would."""


def small_batch(asked: Problem, plan: Plan) -> str | None:
    """A remark if more sequences per step would use the devices much better; None if not, and on a mixed cluster.

    The layout stays the same, so a search with the larger batch may find an even better one.
    """
    best = plan.forecast
    if best is None or plan.cluster is None or asked.cluster.is_mixed:
        return None
    used = asked.of_plan(plan)
    found: dict[int, float] = {}
    for times in TIMES:
        if (batch := asked.job.global_batch_size * times) > MOST_SEQUENCES:
            break
        larger = replace(used, job=asked.job.model_copy(update={"global_batch_size": batch}))
        try:
            forecast = larger.priced(under_pattern(plan.parallelism)).forecast
        except (BadInput, NotExpressible):
            continue
        if forecast.fits:
            found[batch] = forecast.mfu
    most = max(found.values(), default=0.0)
    if most < WORTH_SAYING * best.mfu:
        return None
    enough = next(batch for batch, mfu in found.items() if mfu >= MOST_OF_IT * most)
    times = f"{found[enough] / best.mfu:.1f} times as much"
    return (
        f"{asked.job.global_batch_size:,} sequences a step are few for {plan.parallelism.world_size:,} devices: "
        f"MFU {percent(best.mfu)}; the same layout with {enough:,} would reach "
        f"{percent(found[enough]) if best.mfu >= WORTH_TELLING else times} "
        "(job.global_batch_size; a larger batch may need more tokens for the same loss)"
    )
