"""A schedule as the small numbers of a search."""

from __future__ import annotations

from ahp.schedule.actions import Kind, Schedule
from ahp.schedule.slots import KINDS
from ahp.schedule.synthesis.codes import Orders


def as_orders(schedule: Schedule) -> Orders:
    """The codes of a schedule whose stages take micro-batches in order, as all fixed patterns do."""
    numbers = {Kind(letter): number * schedule.num_stages for number, letter in enumerate(KINDS)}
    return [[numbers[action.kind] + action.stage for action in rank] for rank in schedule.ranks]
