"""Makes a schedule of many micro-batches from one of a few, by repeating its steady part."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ahp.schedule.synthesis.codes import Orders
from ahp.schedule.synthesis.listing import Listed
from ahp.schedule.synthesis.problem import Problem

LONGEST = 4
"""Micro-batches of the longest steady part that is searched for. [Empirical] Longer ones are found a tenth as often as this one."""

ROUNDS = 12
"""A multiple of every part's length."""


@dataclass(frozen=True)
class Part:
    """A piece of the orders in which each stage does ``micro_batches`` forwards, gradients and weight gradients each."""

    start: list[int]
    """Index of the first action of the part, per rank."""
    stop: list[int]
    """Index of the first action after the part, per rank."""
    micro_batches: int
    seconds: float


def fewer(problem: Problem, least: int) -> int:
    """``least`` micro-batches or a few more, such that whole parts can fill up to all of the problem's; or all micro-batches if they are few."""
    m = problem.num_micro_batches
    return m if m <= least + ROUNDS else m - (m - least) // ROUNDS * ROUNDS


def steady_part(problem: Problem, listed: Listed, m: int, period_s: float) -> Part | None:
    """The part with the least time per micro-batch, between two forwards of the first stage; None if there is none.

    ``period_s``: seconds that the fullest rank computes per micro-batch.
    Repeating the part does the same again with later micro-batches: memory after it is what it was before, and its actions wait
    for results from equally far back. So the order with the part repeated fits and ends if the order does.
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
            # An action that ends after the part makes the part look shorter than the fullest rank's work in it.
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
    """The orders with ``more`` further micro-batches, a multiple of the part's."""
    times = more // part.micro_batches
    return [
        order[:stop] + order[start:stop] * times + order[stop:]
        for order, start, stop in zip(orders, part.start, part.stop, strict=True)
    ]
