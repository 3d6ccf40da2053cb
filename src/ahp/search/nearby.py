"""What lies near the best row: the floor of every other decision, and the rows that only memory excludes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Mask
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.choices import ScheduleChoice, ShardingChoice
from ahp.search.exact import Outcome, Place
from ahp.search.space import Rows

NEAR = 2.0
"""A layout that needs more than this many times the device's memory is not reported as a near miss."""

BLOCKS_LOOKED_AT = 5
"""How many blocks, those with the lowest bounds, are searched for rows that do not fit."""

NUM_TOO_LARGE = 3
"""How many layouts that would be faster but do not fit are reported next to the runners-up: those that need the least."""

BLOCK_COLUMNS = {
    "tensor": "tensor",
    "sequence": "sequence_parallel",
    "context": "context",
    "experts": "expert",
    "pipeline": "pipeline",
    "micro-batch": "micro_batch",
}
"""The decisions of ``reasons.CHOICES`` that a whole block has in common."""


@dataclass(frozen=True)
class Nearby:
    """The surroundings of one row of the space that was searched."""

    bounds: Bounds
    found: Outcome
    best: Place
    best_s: float

    def floors(self) -> dict[str, float]:
        """The lowest lower bound, in seconds, of all rows that decide otherwise than the best row; keyed by decision."""
        blocks, (block, _) = self.bounds.space.blocks, self.best
        floors = {}
        for name, column in BLOCK_COLUMNS.items():
            values = getattr(blocks, column)
            other = values != values[block]
            if name == "sequence":
                other &= blocks.tensor > 1
            floors[name] = float(self.found.bounds_s[other].min(initial=np.inf))
        for name in ("schedule", "data", "order", "recompute"):
            floors[name] = self._row_floor_s(name)
        return floors

    def _row_floor_s(self, name: str) -> float:
        """The floor of one decision within a block; in a block that was never opened, any row may decide otherwise."""
        bounds = self.found.bounds_s.copy()
        if name == "schedule":
            bounds[self.bounds.space.blocks.pipeline == 1] = np.inf
        if name == "order" and not self.bounds.space.has_orders:
            return float("inf")
        for block, times_s in self.found.opened.items():
            if np.isfinite(bounds[block]):
                bounds[block] = times_s[self._otherwise(name, block)].min(initial=np.inf)
        return float(bounds.min(initial=np.inf))

    def _otherwise(self, name: str, block: int) -> Mask:
        """The rows of a block that decide otherwise than the best."""
        rows = self.bounds.space.rows(block)
        split, pipe, recompute = self._own
        found = np.zeros(rows.shape, dtype=bool)
        if name == "data":
            found[[s[:3] != split[:3] for s in rows.splits]] = True
        elif name == "order":
            found[[s.order != split.order for s in rows.splits]] = True
        elif name == "schedule":
            found[:, [p != pipe for p in rows.pipes]] = True
        else:
            found[:, :, [kind != recompute for kind in rows.recompute]] = True
        return found.reshape(-1)

    @property
    def _own(self) -> tuple[ShardingChoice, ScheduleChoice, str]:
        block, row = self.best
        return self.bounds.space.rows(block).choices(row)

    def misfits_to_price(self) -> list[Place]:
        """Rows worth a forecast although a bound shows that they do not fit.

        They differ from the best row in one decision, or would be faster and need the least memory.
        """
        chosen = [*self._one_decision_away(), *self._faster()]
        return list(dict.fromkeys(chosen))

    def _needs(self, block: int) -> NDArray[np.float64]:
        """Lower bounds of the memory of a block's rows that do not fit but nearly do; infinite for the others."""
        needs = self.bounds.needs_bytes(block)
        near = needs <= NEAR * self.bounds.problem.capacity_bytes
        return np.where(near & (needs > self.bounds.most_that_fits_bytes()), needs, np.inf)

    def _one_decision_away(self) -> list[Place]:
        block, row = self.best
        needs, rows = self._needs(block), self.bounds.space.rows(block)
        at = np.unravel_index(row, rows.shape)
        found = []
        for axis in range(3):
            alike = np.zeros(rows.shape, dtype=bool)
            alike[tuple(slice(None) if i == axis else at[i] for i in range(3))] = True
            found += self._least(block, np.where(alike.reshape(-1), needs, np.inf), 1)
        for name in ("micro-batch", "sequence"):
            candidates = [place for other in self._blocks_but_for(name) if (place := self._same_row(other)) is not None]
            needed = [float(self._needs(other)[at_row]) for other, at_row in candidates]
            if needed and np.isfinite(min(needed)):
                found.append(candidates[int(np.argmin(needed))])
        return found

    def _blocks_but_for(self, name: str) -> list[int]:
        """Blocks that differ from the best row's block in this column alone."""
        blocks, block = self.bounds.space.blocks, self.best[0]
        same = np.ones(len(blocks), dtype=bool)
        for column in BLOCK_COLUMNS.values():
            values = getattr(blocks, column)
            same &= (values != values[block]) if column == BLOCK_COLUMNS[name] else (values == values[block])
        return np.flatnonzero(same).tolist()

    def _same_row(self, block: int) -> Place | None:
        """The row of another block with the split, pipe and recompute of the best row; None if it has no such row."""
        rows: Rows = self.bounds.space.rows(block)
        split, pipe, recompute = self._own
        if split not in rows.splits or pipe not in rows.pipes or recompute not in rows.recompute:
            return None
        at = rows.splits.index(split), rows.pipes.index(pipe), rows.recompute.index(recompute)
        return block, int(np.ravel_multi_index(at, rows.shape))

    def _faster(self) -> list[Place]:
        lowest = np.argsort(self.found.bounds_s, kind="stable")[:BLOCKS_LOOKED_AT].tolist()
        found: list[tuple[float, Place]] = []
        for block in dict.fromkeys([self.best[0], *lowest]):
            needs = self._needs(block)
            if not np.isfinite(needs).any():
                continue
            times = self.bounds.rows(block, NEAR * self.bounds.problem.capacity_bytes).times_s
            places = self._least(block, np.where(times < self.best_s, needs, np.inf), NUM_TOO_LARGE)
            found += [(float(needs[place[1]]), place) for place in places]
        return [place for _, place in sorted(found)[:NUM_TOO_LARGE]]

    def _least(self, block: int, needs: NDArray[np.float64], count: int) -> list[Place]:
        order = np.argsort(needs, kind="stable")[:count].tolist()
        return [(block, row) for row in order if np.isfinite(needs[row])]
