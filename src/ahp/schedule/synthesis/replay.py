"""When the actions of given orders run, and whether memory holds what they keep."""

from __future__ import annotations

from ahp.schedule.simulate import Run, peak_in_flight
from ahp.schedule.synthesis.codes import Orders, numbered
from ahp.schedule.synthesis.problem import ROUNDING, Problem


def replay(problem: Problem, orders: Orders) -> Run:
    """Run the orders. Raises ValueError if they can never end."""
    return Run(numbered(orders, problem.num_stages), problem.stage_rank, problem.num_micro_batches, problem.times)


def peak_bytes(problem: Problem, orders: Orders) -> tuple[float, ...]:
    """The most that each rank keeps at once. Raises ValueError if a weight gradient comes before its input gradient."""
    return peak_in_flight(numbered(orders, problem.num_stages), problem.kept_bytes, problem.freed_bytes)


def fits(problem: Problem, orders: Orders) -> bool:
    """Whether every rank has memory for what it keeps, up to rounding."""
    return all(
        peak <= memory * (1 + ROUNDING)
        for peak, memory in zip(peak_bytes(problem, orders), problem.memory_bytes, strict=True)
    )
