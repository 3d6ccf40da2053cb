"""Gradient reductions that overlap with the computation of a rank's other stages.

AHP's runtime begins to reduce a stage's gradients when the last gradient is there, goes on with the rank's other stages, and waits for
all reductions after the rank's last action (``runtime/pipeline/torch_compat.py``: ``reduce_beside``). Reductions are then all that a
last backward pass has once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ahp.arrays import Floats, Ints
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.stage import StageCost
from ahp.forecast.states import TraitColumns
from ahp.plan import Parallelism
from ahp.schedule.orders import splits_backward
from ahp.schedule.simulate import StageTimes

PART = "gradient_reduce"


@dataclass(frozen=True)
class Reductions:
    """The reductions of one replica that overlap with computation; empty where none do."""

    each_s: tuple[float, ...] = ()
    """Seconds of each stage's reductions, one collective after the other."""

    @classmethod
    def of(cls, parallelism: Parallelism, costs: Sequence[StageCost]) -> Reductions:
        """The reductions of a layout that overlaps them with computation."""
        last = [cost.last_weight_gradient if splits_backward(parallelism) else cost.last_backward for cost in costs]
        return cls(tuple(once[PART] for once in last))

    def stages(self, costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
        """The stages without their waits for reductions."""
        if not self.each_s:
            return tuple(costs)
        nothing = {PART: 0.0}
        without = {
            key: replace(
                cost,
                last_backward=cost.last_backward | nothing,
                last_weight_gradient=cost.last_weight_gradient | nothing,
            )
            for key, cost in {id(cost): cost for cost in costs}.items()
        }
        return tuple(without[id(cost)] for cost in costs)

    def times(self, times: Sequence[StageTimes]) -> list[StageTimes]:
        """The times with the reductions that overlap with computation, and how much these slow it down."""
        if not self.each_s:
            return list(times)
        pairs = zip(times, self.each_s, strict=True)
        return [one._replace(reduce_s=seconds, reduce_slows=CONTENTION) for one, seconds in pairs]


def reduces_beside(parallelism: Parallelism, data: DataParallel) -> bool:
    """Whether a rank computes its other stages while one stage's gradients are reduced."""
    return parallelism.virtual_stages_per_rank > 1 and data.overlap == 1.0 and data.traits.reduce.beside_stages


def share_beside(virtual: int | Ints, traits: TraitColumns, overlap: float) -> Floats:
    """[N, 1] Share of the reductions after a stage's last backward pass that overlap with the rank's other stages: 1 or 0.

    ``virtual``: stages of a rank; ``overlap``: 1 where collectives can overlap with computation, else 0.
    """
    return traits.reduce.beside_stages * (virtual > 1) * (overlap == 1.0)
