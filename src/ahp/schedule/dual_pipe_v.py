"""DualPipeV (github.com/deepseek-ai/DualPipe, after arXiv 2412.19437). ``ScheduleDualPipeV`` of torch 2.13."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ahp.schedule.actions import Action, Kind
from ahp.schedule.v_shape import Order, VShaped


class DualPipeV(VShaped):
    """Splits the backward of some micro-batches only."""

    name = "DualPipeV"
    actions_per_micro_batch = 4

    def runs(self, p: int, v: int, m: NDArray[np.int64], *, in_torch: bool) -> NDArray[np.bool_]:
        """At least two micro-batches per rank."""
        return m >= 2 * p

    def why_not(self, p: int, m: int) -> str:
        """Torch's rule."""
        valid = f"up to {m // 2}" if m >= 4 else "none"
        return (
            f"pipeline_parallel_degree = {p}: DualPipeV needs two micro-batches for each rank, there are {m} "
            f"(valid: {valid}, or pipeline_parallel_schedule ZBVZeroBubble)"
        )

    def forwards_before_gradient(self, p: int, v: int, m: int) -> NDArray[np.int64]:
        """Those in flight, and one more on the rank where the pipeline turns."""
        found = self.in_flight(p, v, m)
        found[-1, 0] = min(found[-1, 0] + (p > 1), m)
        return found

    def num_split(self, stage: int, p: int, m: int) -> int:
        """Some micro-batches while the pipeline fills and drains."""
        if stage < p:
            return p - (stage + 1) // 2
        rank = 2 * p - 1 - stage
        last = rank + 1 - (rank + 1) // 2 - (rank % 2 == 0)
        return p - rank - 1 + last

    def last_weights_s(self, weight_s: NDArray[np.float64], p: int, v: int, m: int) -> tuple[NDArray[np.float64], bool]:
        """One weight gradient for each rank from the first to this one."""
        return (np.arange(p) + 1) * weight_s.max(axis=-1), False

    def rank_actions(self, rank: int, p: int, v: int, m: int) -> list[Action]:
        """Where torch names an overlapped forward and backward, its runtime runs one after the other; so does this order."""
        forward, whole, gradient = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT
        order, down, up, after = Order(m), rank, 2 * p - 1 - rank, p - rank - 1
        for _ in range(2 * after):
            order.add(forward, down)
        for _ in range(rank + 1):
            order.add(forward, down)
            order.add(forward, up)
        for _ in range(after):
            order.add(gradient, up)
            order.add_deferred()
            order.add(forward, up)
        for _ in range(m - 2 * p + rank + 1):
            order.add(forward, down)
            order.add(whole, up)
            order.add(forward, up)
            order.add(whole, down)
        for _ in range(after):
            order.add(whole, up)
            order.add(forward, up)
            order.add(whole, down)
        # The second half of these backwards defers its weight gradients, beginning with ``up`` on odd ranks and ``down`` on even.
        half = (rank + 1) // 2
        for i in range(rank + 1):
            order.add(gradient if i >= half + (rank % 2 == 0) else whole, up)
            order.add(gradient if i >= half else whole, down)
        for _ in range(after):
            order.add_deferred()
            order.add(gradient, down)
        for _ in range(rank + 1):
            order.add_deferred()
        return order.actions
