"""What ZBVZeroBubble and DualPipeV share: rank r holds stage r and stage 2p - 1 - r.

``down`` is a rank's stage on the way to the last rank, where the pipeline turns, and ``up`` its stage on the way back.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from ahp.schedule.actions import Action, Kind
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.placement import Placement
from ahp.schedule.slots import Period

STEADY = 4
"""With 2 p + STEADY micro-batches these schedules have more than one steady period (the tests compare whole tables)."""


class VShaped(PipelineSchedule):
    """Two stages per rank, with weight gradients computed apart from input gradients."""

    placement = Placement.V_SHAPED
    fewest_virtual = 2
    most_virtual = 2
    splits_backward = True
    actions_per_micro_batch: int
    """Actions of one rank per micro-batch, in the steady state."""

    def period(self, p: int, v: int, m: int) -> Period | None:
        """One micro-batch."""
        return Period(1, self.actions_per_micro_batch, enough=2 * p + STEADY)

    def in_flight(self, p: int, v: int, m: int) -> NDArray[np.int64]:
        """Forwards down until the first micro-batch comes back up, then one forward up for each further one down."""
        if p == 1:
            return np.ones((1, v), dtype=np.int64)
        rank = np.arange(p)
        return np.minimum(np.stack([2 * p - rank - 1, rank + 1], axis=1), m)

    def forwards_before_gradient(self, p: int, v: int, m: int) -> NDArray[np.int64]:
        """The same as at the fullest moment."""
        return self.in_flight(p, v, m)


class Order:
    """The actions of one rank so far; micro-batches of each kind and stage are numbered as they come."""

    def __init__(self, num_micro_batches: int) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.num_micro_batches = num_micro_batches
        self.deferred: deque[tuple[int, int]] = deque()
        """Stage and micro-batch of input gradients whose weight gradient has not been scheduled."""

    def add(self, kind: Kind, stage: int) -> None:
        """Append the action for the next micro-batch; one beyond the last is counted but not run."""
        # Whole and split backwards of a stage share one count.
        count = (Kind.INPUT_GRADIENT if kind is Kind.BACKWARD else kind), stage
        micro_batch = self.done[count]
        self.done[count] += 1
        if micro_batch < self.num_micro_batches:
            self.actions.append(Action(kind, stage, micro_batch))
            if kind is Kind.INPUT_GRADIENT:
                self.deferred.append((stage, micro_batch))

    def add_deferred(self) -> None:
        """Append the weight gradient that has waited longest, if any waits."""
        if self.deferred:
            self.actions.append(Action(Kind.WEIGHT_GRADIENT, *self.deferred.popleft()))
