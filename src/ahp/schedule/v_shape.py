"""Orders of the two schedules whose ranks hold stage r and stage 2p-1-r: ZBVZeroBubble and DualPipeV.

As ``ScheduleZBVZeroBubble`` and ``ScheduleDualPipeV`` of torch 2.13 order them. ZBV is arXiv 2401.10241,
section 6; DualPipeV is github.com/deepseek-ai/DualPipe after arXiv 2412.19437. On every rank ``down`` is the stage
on the way to the turn and ``up`` the one on the way back.
"""

from __future__ import annotations

from collections import Counter, deque

from ahp.schedule.actions import Action, Kind


class _Order:
    """The actions of one rank so far; micro-batches of each kind and stage are numbered as they come."""

    def __init__(self, num_micro_batches: int) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.num_micro_batches = num_micro_batches
        self.deferred: deque[tuple[int, int]] = deque()
        """Stage and micro-batch of input gradients whose weight gradient has not been scheduled."""

    def add(self, kind: Kind, stage: int) -> None:
        """The next micro-batch; one that is not there is counted but not run."""
        # Whole and split backwards of a stage share one count.
        count = (Kind.INPUT_GRADIENT if kind is Kind.BACKWARD else kind), stage
        micro_batch = self.done[count]
        self.done[count] += 1
        if micro_batch < self.num_micro_batches:
            self.actions.append(Action(kind, stage, micro_batch))
            if kind is Kind.INPUT_GRADIENT:
                self.deferred.append((stage, micro_batch))

    def add_deferred(self) -> None:
        """The weight gradient that has waited longest, if one waits."""
        if self.deferred:
            self.actions.append(Action(Kind.WEIGHT_GRADIENT, *self.deferred.popleft()))


def zbv(rank: int, p: int, m: int) -> list[Action]:
    """ZBVZeroBubble. Orders at least 2p - 1 micro-batches and leaves out those that are not there, as torch does."""
    forward, gradient, weight = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
    order, down, up, full = _Order(m), rank, 2 * p - 1 - rank, max(2 * p - 1, m)
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


def dual_pipe_v(rank: int, p: int, m: int) -> list[Action]:
    """DualPipeV. Where torch names an overlapped forward and backward its runtime runs one after the other: so here."""
    forward, whole, gradient = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT
    order, down, up, after = _Order(m), rank, 2 * p - 1 - rank, p - rank - 1
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
    # The second half of these backwards defers its weight gradients; an odd rank begins with that of ``up``.
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
