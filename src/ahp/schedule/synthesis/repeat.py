"""From the schedule of a few micro-batches to that of many: its steady part, again and again."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ahp.schedule.synthesis.codes import Orders
from ahp.schedule.synthesis.listing import Listed
from ahp.schedule.synthesis.problem import Problem

LONGEST = 4
"""Micro-batches of the longest part that is looked for. [Empirical] Longer ones are found a tenth as often as this one."""

ROUNDS = 12
"""A number that every part's length divides."""


@dataclass(frozen=True)
class Part:
    """A piece of the orders in which each stage does as many forwards, gradients and weight gradients."""

    start: list[int]
    """Of each rank, the first of its actions."""
    stop: list[int]
    """Of each rank, the first action after it."""
    micro_batches: int
    seconds: float


def fewer(problem: Problem, least: int) -> int:
    """``least`` micro-batches or a few more, such that whole parts lead from them to all there are; or all there are."""
    m = problem.num_micro_batches
    return m if m <= least + ROUNDS else m - (m - least) // ROUNDS * ROUNDS


def steady_part(problem: Problem, listed: Listed, m: int, period_s: float) -> Part | None:
    """The part that takes the least time for a micro-batch, between two forwards of the first stage; None if there is none.

    ``period_s``: what the fullest rank computes for a micro-batch.
    To repeat it is to do the same again with later micro-batches: memory is after it what it was before, and what its actions
    wait for comes from as much earlier. So an order with it repeated fits and ends if the order does.
    """
    ranks = range(problem.num_ranks)
    codes: list[dict[int, list[float]]] = [{} for _ in ranks]
    for of_code, order, starts in zip(codes, listed.orders, listed.starts_s, strict=True):
        for code, start in zip(order, starts, strict=True):
            of_code.setdefault(code, []).append(start)
    first = codes[problem.stage_rank[0]][0]
    best, best_s = None, float("inf")
    for length in range(1, LONGEST + 1):
        for k in range(m - length - 1, 0, -1):
            begin, end = first[k], first[k + length]
            # An action that ends after the part makes it look shorter than what the fullest rank does in it.
            of_one_s = max((end - begin) / length, period_s)
            if of_one_s < best_s * (1 - 1e-9) and all(
                bisect_left(found, end) - bisect_left(found, begin) == length for c in codes for found in c.values()
            ):
                best, best_s = (begin, end, length), of_one_s
    if best is None:
        return None
    begin, end, length = best
    start = [bisect_left(starts, begin) for starts in listed.starts_s]
    stop = [bisect_left(starts, end) for starts in listed.starts_s]
    return Part(start, stop, length, best_s * length)


def repeated(orders: Orders, part: Part, more: int) -> Orders:
    """The orders with ``more`` micro-batches more, a multiple of the part's."""
    times = more // part.micro_batches
    return [
        order[:stop] + order[start:stop] * times + order[stop:]
        for order, start, stop in zip(orders, part.start, part.stop, strict=True)
    ]
