"""Interleaved 1F1B (arXiv 2104.04473, section 2.2). ``ScheduleInterleaved1F1B`` of torch 2.13."""

from __future__ import annotations

from ahp.arrays import Ints, Mask
from ahp.schedule.depth_first import DepthFirst, uneven_rounds, whole_rounds


class Interleaved1F1B(DepthFirst):
    """Two or more stages per rank, micro-batches in whole rounds."""

    name = "Interleaved1F1B"
    fewest_virtual = 2
    most_virtual = None

    def runs(self, p: int, v: int, m: Ints, *, in_torch: bool) -> Mask:
        """Whole rounds."""
        return whole_rounds(p, m)

    def why_not(self, p: int, m: int) -> str:
        """Torch's rule."""
        return uneven_rounds(self.name, p, m)

    def passes_behind(self, stage: int, p: int) -> int:
        """Micro-batches go in groups of p: after a stage's last backward, p - 1 of the rank's next stage come before its last."""
        return p - 1 if stage >= p else 0
