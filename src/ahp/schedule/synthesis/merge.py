"""Merges an input gradient and the weight gradient right after it into a whole backward, where no action waits for the first."""

from __future__ import annotations

from itertools import pairwise

from ahp.schedule.slots import BACKWARD
from ahp.schedule.synthesis.codes import Orders, numbered
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
    times, ends_s = problem.times, replay(problem, orders).ends_s
    actions = numbered(orders, problem.num_stages)
    starts_s: dict[tuple[int, int], float] = {}
    """When each stage starts the backward of each micro-batch, whole or its first part."""
    for order, ends in zip(actions, ends_s, strict=True):
        for (letter, stage, number), at in zip(order, ends, strict=True):
            if letter in "BI":
                whole = letter == "B"
                starts_s[stage, number] = at - (times[stage].backward_s if whole else times[stage].input_gradient_s)
    pairs = []
    for rank, order in enumerate(actions):
        for place, ((letter, stage, number), after) in enumerate(pairwise(order)):
            if letter == "I" and after == ("W", stage, number):
                waits_s = float("-inf")
                if stage:
                    waits_s = ends_s[rank][place] + times[stage].send_backward_s - starts_s[stage - 1, number]
                pairs.append((waits_s, rank, place))
    return pairs


def _with_pairs(problem: Problem, orders: Orders, pairs: set[tuple[int, int]]) -> Orders:
    """The orders with a whole backward in place of each of the ``pairs`` (rank, place of the first)."""
    stages = problem.num_stages
    return [
        [
            BACKWARD * stages + code % stages if (rank, place) in pairs else code
            for place, code in enumerate(order)
            if (rank, place - 1) not in pairs
        ]
        for rank, order in enumerate(orders)
    ]
