"""Whether a setting with which the same job needs less memory would let a faster layout fit."""

from __future__ import annotations

from ahp.plan import Plan
from ahp.search.fastest import fastest
from ahp.search.misfit import lighter
from ahp.search.problem import Problem
from ahp.search.ties import TIED
from ahp.words import percent, seconds


def less_memory(asked: Problem, best: Plan) -> str | None:
    """A remark on the setting of ``misfit.lighter`` with which another layout is the fastest, by more than the forecast can tell apart; None
    if there is none.

    It is looked for where the plan recomputes layers, which shows that memory binds, but not on a mixed cluster, whose search is long.
    ``asked``: with the kind of blocks of ``best``, which is the fastest plan without such a setting.
    """
    if asked.cluster.is_mixed or best.parallelism.activation_checkpoint == "none":
        return None
    step_s, remark = best.priced.step_time_s, None
    for setting, changed in lighter(asked):
        limit_s = step_s * (1 - TIED)
        found = fastest(changed, limit_s)
        if found is None or found.best is None or found.best[1].step_time_s >= limit_s:
            continue
        layout, step_s = found.best[0], found.best[1].step_time_s
        less = percent(1 - step_s / best.priced.step_time_s)
        remark = f"faster with {setting}: {layout.short()}, {seconds(step_s)} a step, {less} less"
    return remark
