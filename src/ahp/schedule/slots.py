"""The place of each action in a schedule's table, and how the rows of the table repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ahp.arrays import Ints

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(4)
KINDS = "FBIW"
"""The letter of each kind, indexed by its number above."""


@dataclass(frozen=True)
class Slots:
    """Actions and their places, one array entry per action: row, rank, kind (above), stage, micro-batch.

    A rank has at most one action in a row, and whatever an action waits for is in an earlier row.
    """

    row: Ints
    rank: Ints
    kind: Ints
    stage: Ints
    micro_batch: Ints


class Period(NamedTuple):
    """Rows in the middle of a table that repeat with later micro-batches: a table of more micro-batches has more of these rows."""

    micro_batches: int
    rows: int
    enough: int | None = None
    """Micro-batches with which the table has more than one period and longer tables are made by repeating it; None: made in full."""
