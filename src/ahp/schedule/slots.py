"""Where the actions of a schedule stand in its table, and how the rows of the table repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ahp.arrays import Ints

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(4)
KINDS = "FBIW"
"""The letters of actions at their numbers above."""


@dataclass(frozen=True)
class Slots:
    """Actions and where they stand, one entry each: row, rank, kind (above), stage, micro-batch.

    A rank has at most one action in a row, and what an action waits for stands in an earlier row.
    """

    row: Ints
    rank: Ints
    kind: Ints
    stage: Ints
    micro_batch: Ints


class Period(NamedTuple):
    """Rows in the middle of a table that come again with later micro-batches: a table of more of them has more of these rows."""

    micro_batches: int
    rows: int
    enough: int | None = None
    """Micro-batches from which on the table has more than one period, where longer tables are made from that one."""
