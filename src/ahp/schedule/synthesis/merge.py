"""Merges an input gradient and the weight gradient right after it into a whole backward, where no action waits for the first."""

from __future__ import annotations

from ahp.schedule.synthesis.codes import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Orders
from ahp.schedule.synthesis.problem import Problem
from ahp.schedule.synthesis.replay import replay

TRIES = 4
"""How many numbers of pairs are tried: all, then half as many each time."""


def merged(problem: Problem, orders: Orders, end_s: float) -> tuple[Orders, float]:
    """The orders with the most whole backwards tried that do not make them end later, and when they end.

    A whole backward frees what it keeps no later than its two parts do, so memory does not grow. But it makes the gradient
    that it sends later: pairs whose gradient is the least urgent are the first to be merged.
    """
    pairs = sorted(_pairs(problem, orders))
    count = len(pairs)
    for _ in range(TRIES):
        if not count:
            break
        found = _with_pairs(problem, orders, {pair[1:] for pair in pairs[:count]})
        found_s = replay(problem, found).end_s
        if found_s <= end_s * (1 + 1e-12):
            return found, found_s
        count //= 2
    return orders, end_s


def _pairs(problem: Problem, orders: Orders) -> list[tuple[float, int, int]]:
    """Urgency of the gradient, rank and place of each pair that can be merged."""
    stages, times = problem.num_stages, problem.times
    ends = replay(problem, orders).ends_s
    starts_of: list[list[float]] = [[] for _ in range(stages)]
    for order, end in zip(orders, ends, strict=True):
        for code, at in zip(order, end, strict=True):
            kind, stage = divmod(code, stages)
            if kind in (BACKWARD, INPUT_GRADIENT):
                starts_of[stage].append(
                    at - (times[stage].backward_s if kind == BACKWARD else times[stage].input_gradient_s)
                )
    pairs = []
    for rank, order in enumerate(orders):
        apart: list[list[int]] = [[] for _ in range(stages)]
        gradients, weights = [0] * stages, [0] * stages
        for place, code in enumerate(order):
            kind, stage = divmod(code, stages)
            if kind in (BACKWARD, INPUT_GRADIENT):
                if kind == INPUT_GRADIENT:
                    apart[stage].append(gradients[stage])
                gradients[stage] += 1
            elif kind == WEIGHT_GRADIENT:
                number = apart[stage][weights[stage]]
                weights[stage] += 1
                if order[place - 1] == INPUT_GRADIENT * stages + stage and number == gradients[stage] - 1:
                    waits_s = float("-inf")
                    if stage:
                        there_s = ends[rank][place - 1] + times[stage].send_backward_s
                        waits_s = there_s - starts_of[stage - 1][number]
                    pairs.append((waits_s, rank, place - 1))
    return pairs


def _with_pairs(problem: Problem, orders: Orders, pairs: set[tuple[int, int]]) -> Orders:
    stages = problem.num_stages
    found: Orders = []
    for rank, order in enumerate(orders):
        new, skip = [], False
        for place, code in enumerate(order):
            if skip:
                skip = False
            elif (rank, place) in pairs:
                new.append(BACKWARD * stages + code % stages)
                skip = True
            else:
                new.append(code)
        found.append(new)
    return found
