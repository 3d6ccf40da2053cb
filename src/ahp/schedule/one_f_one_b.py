"""1F1B (arXiv 1806.03377, 2104.04473): one forward, one backward. ``Schedule1F1B`` of torch 2.13."""

from __future__ import annotations

from ahp.arrays import Ints, Mask
from ahp.schedule.actions import Action, Kind
from ahp.schedule.depth_first import DepthFirst


class OneForwardOneBackward(DepthFirst):
    """Works with any number of micro-batches; torch requires at least one per rank."""

    name = "1F1B"
    one_forward_one_backward = True

    def rank_actions(self, rank: int, p: int, v: int, m: int) -> list[Action]:
        """Warm-up, steady state, and the remaining backwards."""
        warmup = min(m, p - 1 - rank)
        actions = [Action(Kind.FORWARD, rank, i) for i in range(warmup)]
        for i in range(m - warmup):
            actions += [Action(Kind.FORWARD, rank, warmup + i), Action(Kind.BACKWARD, rank, i)]
        return actions + [Action(Kind.BACKWARD, rank, i) for i in range(m - warmup, m)]

    def runs(self, p: int, v: int, m: Ints, *, in_torch: bool) -> Mask:
        """Any number; in torch at least one micro-batch per rank."""
        return m >= (p if in_torch else 1)

    def why_not(self, p: int, m: int) -> str:
        """Torch's rule."""
        return (
            f"pipeline_parallel_degree = {p}: torch's 1F1B needs at least as many micro-batches, there are {m} "
            f"(valid: up to {m}, or pipeline_parallel_schedule GPipe)"
        )
