"""The order of each rank as small numbers, for a search that makes, compares and repeats many orders."""

from __future__ import annotations

from ahp.schedule.actions import Action, Kind, PlainAction, Schedule
from ahp.schedule.slots import FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT

Orders = list[list[int]]
"""For each rank, the codes kind x S + stage of its actions (kinds as in ``schedule.slots``, S stages).

A code needs no micro-batch, because each stage takes them in order. This loses no schedule, because micro-batches are
interchangeable: a stage's k-th forward, gradient or weight gradient can as well be that of micro-batch k.
"""


def numbered(orders: Orders, stages: int) -> list[list[PlainAction]]:
    """The orders with the micro-batch of each action. Raises ValueError for a weight gradient before its input gradient."""
    found = []
    for order in orders:
        forwards, gradients, weights = [0] * stages, [0] * stages, [0] * stages
        apart: list[list[int]] = [[] for _ in range(stages)]
        actions: list[PlainAction] = []
        for code in order:
            kind, stage = divmod(code, stages)
            if kind == FORWARD:
                number = forwards[stage]
                forwards[stage] += 1
            elif kind == WEIGHT_GRADIENT:
                if weights[stage] == len(apart[stage]):
                    raise ValueError(f"a weight gradient of stage {stage} comes before its input gradient")
                number = apart[stage][weights[stage]]
                weights[stage] += 1
            else:
                number = gradients[stage]
                gradients[stage] += 1
                if kind == INPUT_GRADIENT:
                    apart[stage].append(number)
            actions.append((KINDS[kind], stage, number))
        found.append(actions)
    return found


def as_schedule(name: str, orders: Orders, stage_rank: tuple[int, ...], m: int) -> Schedule:
    """The orders as a ``Schedule`` of ``m`` micro-batches."""
    kinds = {str(kind): kind for kind in Kind}
    ranks = [
        tuple(Action(kinds[letter], stage, number) for letter, stage, number in order)
        for order in numbered(orders, len(stage_rank))
    ]
    return Schedule(name, len(stage_rank), m, tuple(ranks), stage_rank)
