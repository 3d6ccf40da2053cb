"""Some shapes of a mixed cluster as columns, with their floors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.search.mixed.replicas import selected


class Shapes(NamedTuple):
    """Some shapes, [n] each."""

    schedule: Ints
    """Index in the space's schedules."""
    rows: Ints
    """Index in the space's ``alike``."""
    pipeline: Ints
    replicas: Ints
    slowest: Floats
    """The factor for the slowest of their devices."""
    floor_s: Floats
    """Seconds that the shapes take at least, with this factor."""

    where = selected

    @property
    def lowest_s(self) -> float:
        """The lowest floor, where the shapes are sorted."""
        return float(self.floor_s[0]) if len(self.floor_s) else float("inf")

    def sorted(self) -> Shapes:
        """The same shapes, the lowest floor first."""
        return self.where(np.argsort(self.floor_s, kind="stable"))

    def split(self, floor_s: float) -> tuple[Shapes, Shapes]:
        """The shapes up to a floor, and the others, where the shapes are sorted."""
        at = int(np.searchsorted(self.floor_s, floor_s, side="right"))
        return self.where(slice(at)), self.where(slice(at, None))

    @classmethod
    def all(cls, each: Sequence[Shapes]) -> Shapes:
        """The shapes of each, one after another."""
        return (
            cls(*map(np.concatenate, zip(*each, strict=True)))
            if each
            else cls(*np.zeros((4, 0), int), *np.zeros((2, 0)))
        )
