"""GPipe (arXiv 1811.06965): all forwards, then all backwards. ``ScheduleGPipe`` of torch 2.13."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ahp.schedule.actions import Action, Kind
from ahp.schedule.descriptor import PipelineSchedule


class GPipe(PipelineSchedule):
    """Every rank holds all micro-batches at once."""

    name = "GPipe"
    all_forwards_first = True

    def rank_actions(self, rank: int, p: int, v: int, m: int) -> list[Action]:
        """All forwards, then all backwards, each in the order of micro-batches."""
        return [Action(kind, rank, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(m)]

    def in_flight(self, p: int, v: int, m: int) -> NDArray[np.int64]:
        """All ``m``."""
        return np.full((p, 1), m, dtype=np.int64)
