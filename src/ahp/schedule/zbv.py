"""ZB-V (arXiv 2401.10241, section 6). ``ScheduleZBVZeroBubble`` of torch 2.13."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ahp.schedule.actions import Action, Kind
from ahp.schedule.v_shape import Order, VShaped


class ZBVZeroBubble(VShaped):
    """No bubble if a forward, an input gradient and a weight gradient take the same time."""

    name = "ZBVZeroBubble"
    actions_per_micro_batch = 6

    def last_weights_s(self, weight_s: NDArray[np.float64], p: int, v: int, m: int) -> tuple[NDArray[np.float64], bool]:
        """The weight gradients of the drain, or all weight gradients if there are few micro-batches."""
        if m < 2 * p - 1:
            return m * weight_s.sum(axis=-1), False
        rank = np.arange(p)
        return (rank + 1) * weight_s[..., 0] + rank * weight_s[..., 1], False

    def rank_actions(self, rank: int, p: int, v: int, m: int) -> list[Action]:
        """Orders at least 2p - 1 micro-batches and leaves out those beyond the last, as torch does."""
        forward, gradient, weight = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
        order, down, up, full = Order(m), rank, 2 * p - 1 - rank, max(2 * p - 1, m)
        for _ in range(2 * (p - rank) - 1):
            order.add(forward, down)
        for _ in range(rank):
            order.add(forward, up)
            order.add(forward, down)
        for _ in range(p - rank):
            for kind in (forward, gradient, weight):
                order.add(kind, up)
        while order.done[forward, up] < full:
            if order.done[forward, down] < full:
                order.add(forward, down)
            order.add(gradient, down)
            order.add(weight, down)
            for kind in (forward, gradient, weight):
                order.add(kind, up)
        for _ in range(rank):
            order.add(gradient, down)
            order.add(gradient, up)
        for _ in range(p - rank):
            order.add(gradient, down)
            order.add(weight, down)
        for stage in (up, down):
            while order.done[weight, stage] < full:
                order.add(weight, stage)
        return order.actions
