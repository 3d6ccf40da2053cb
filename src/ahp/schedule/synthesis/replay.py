"""When the actions of given orders run, and whether memory holds what they keep."""

from __future__ import annotations

from ahp.schedule.simulate import Run, peak_of
from ahp.schedule.synthesis.codes import Orders, numbered
from ahp.schedule.synthesis.problem import ROUNDING, Problem


def replay(problem: Problem, orders: Orders) -> Run:
    """Run the orders. Raises ValueError where they can never end."""
    return Run(numbered(orders, problem.num_stages), problem.stage_rank, problem.num_micro_batches, problem.times)


def peak_bytes(problem: Problem, orders: Orders) -> tuple[float, ...]:
    """Per rank, the most that it keeps at once. Raises ValueError where a weight gradient comes before its input gradient."""
    return peak_of(numbered(orders, problem.num_stages), problem.kept_bytes, problem.freed_bytes)


def fits(problem: Problem, orders: Orders) -> bool:
    """Whether no rank keeps more than it has memory for, but for rounding."""
    return all(
        peak <= memory * (1 + ROUNDING)
        for peak, memory in zip(peak_bytes(problem, orders), problem.memory_bytes, strict=True)
    )
