"""Swaps neighbors in an order at random, as long as the step gets no longer: orders that no rule makes."""

from __future__ import annotations

from random import Random

from ahp.schedule.synthesis.codes import Orders
from ahp.schedule.synthesis.problem import Problem
from ahp.schedule.synthesis.replay import fits, replay


def swapped(
    problem: Problem, orders: Orders, end_s: float, random: Random, tries: int, enough_s: float
) -> tuple[Orders, float]:
    """The best orders found, and when they end. Stops at ``enough_s``.

    Swaps that do not change when the orders end are kept too: the next swap may need them.
    """
    orders = [list(order) for order in orders]
    for _ in range(tries):
        if end_s <= enough_s:
            break
        order = orders[random.randrange(len(orders))]
        first = random.randrange(len(order) - 1)
        second = min(len(order) - 1, first + random.choice((1, 1, 2, 3)))
        moved = order.pop(second)
        order.insert(first, moved)
        try:
            found_s = replay(problem, orders).end_s if fits(problem, orders) else float("inf")
        except ValueError:  # it cannot run
            found_s = float("inf")
        if found_s <= end_s:
            end_s = found_s
        else:
            order.insert(second, order.pop(first))
    return orders, end_s
