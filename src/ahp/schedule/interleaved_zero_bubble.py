"""Interleaved 1F1B with separate weight gradients. ``ScheduleInterleavedZeroBubble`` of torch 2.13.

With v = 1 it is the published ZB-H1 (arXiv 2401.10241, section 3), which works with any m; torch requires whole rounds there too.
"""

from __future__ import annotations

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.schedule.depth_first import DepthFirst, held_after, round_length, uneven_rounds, whole_rounds


class InterleavedZeroBubble(DepthFirst):
    """On each rank, weight gradients run ``rank`` input gradients behind."""

    name = "InterleavedZeroBubble"
    most_virtual = None
    splits_backward = True
    one_forward_one_backward = True

    def runs(self, p: int, v: int, m: Ints, *, in_torch: bool) -> Mask:
        """Whole rounds; outside torch any number with one stage per rank."""
        return whole_rounds(p, m) if in_torch or v > 1 else m >= 1

    def why_not(self, p: int, m: int) -> str:
        """Torch's rule."""
        return uneven_rounds(self.name, p, m)

    def in_flight(self, p: int, v: int, m: int) -> Ints:
        """All forwards before the first weight gradient: the warm-up, one more, and one for each weight gradient behind."""
        return held_after(np.full(p, (v - 1) * round_length(p, v, m) + p), p, v, m)

    def fewest_deferred(self, p: int, v: int, m: int) -> int | Ints:
        """With one stage per rank: the weight gradients that are behind, and the last one."""
        return np.minimum(np.arange(p) + 1, m) if v == 1 else 1

    def last_weights_s(self, weight_s: Floats, p: int, v: int, m: int) -> tuple[Floats, bool | Mask]:
        """The weight gradients that are behind; the lowest stage's alone if its last round has that many."""
        count = np.minimum(np.arange(p) + 1, m * v)
        lowest = (v == 1) | (count <= m // max(1, m // p))
        return count * np.where(lowest, weight_s[..., 0], weight_s.max(axis=-1)), lowest
