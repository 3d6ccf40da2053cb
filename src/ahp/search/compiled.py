"""Whether blocks are compiled, if that is left open: what is searched, and the reason for the choice."""

from __future__ import annotations

from dataclasses import replace

from ahp.errors import BadInput, NotExpressible
from ahp.forecast.efficiency import is_cpu
from ahp.plan import Plan
from ahp.search import reasons
from ahp.search.problem import Problem
from ahp.words import compared, seconds

ON_CPU = (
    "eager blocks: on a CPU compiled blocks saved 3 % of a small model's step, where 10 % were forecast, and took 16 s to "
    "compile (engine.compile true compiles them)"
)
"""Measured with the model ``tiny`` on one thread (docs/decisions/compiled-or-eager.md)."""

NOT_COUNTED = "the time to compile, once at the start, is not counted"


def compiling(asked: Problem) -> tuple[Problem, str]:
    """The problem with the only possible kind of blocks, or with ``either_blocks``; and why only one kind is possible: empty if both are, or if
    the user or the engine leaves no choice."""
    if asked.engine.compile is not None:
        return asked, ""
    if asked.engine.name != "ahp":
        return asked.eager, ""
    if any(is_cpu(group.device) for group in asked.cluster.groups):
        return asked.eager, ON_CPU
    try:
        asked.compiled.check()
    except (BadInput, NotExpressible) as refusal:
        return asked.eager, f"eager blocks: {refusal}"
    return replace(asked, either_blocks=True), ""


def why_compiled(best: Plan, asked: Problem) -> str:
    """Why blocks of the best plan are compiled: what the same layout would cost with eager blocks."""
    eager = asked.of_plan(best).eager
    other = eager.priced(best.parallelism).forecast
    gain = compared(1 - best.priced.step_time_s / other.step_time_s, "faster than", "slower than", "as fast as")
    against = f"{gain} the same layout with eager ones, {seconds(other.step_time_s)} a step"
    if not other.fits:
        against += f", which {reasons.does_not_fit(other, eager.capacity_bytes)}"
    return f"compiled blocks: {against}; {NOT_COUNTED}"


def why_eager(best: Plan, compiled: Plan) -> str:
    """Why blocks are eager, if the best layout with compiled blocks is slower."""
    slower = reasons.is_slower_because(compiled.priced, best.priced)
    return f"eager blocks: the best with compiled ones, {compiled.parallelism.short()}, {slower}"
