"""Gradients that are reduced beside the computation of a rank's other stages.

AHP's runtime begins to reduce those of a stage when its last one is there, goes on with the rank's other stages, and waits for all of
them when the rank has done its last action (``runtime/pipeline/torch_compat.py``: ``reduce_beside``). Of the last backward pass nothing
else comes once a step there.
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
    """What is reduced beside the computation of one replica; empty where nothing is."""

    each_s: tuple[float, ...] = ()
    """Of each stage, one collective after the other."""

    @classmethod
    def of(cls, parallelism: Parallelism, costs: Sequence[StageCost]) -> Reductions:
        """Of a layout whose gradients are reduced beside the computation."""
        last = [cost.last_weight_gradient if splits_backward(parallelism) else cost.last_backward for cost in costs]
        return cls(tuple(once[PART] for once in last))

    def stages(self, costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
        """The stages without what they waited for reductions."""
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
        """The times with what is reduced beside the computation, and what that slows down."""
        if not self.each_s:
            return list(times)
        pairs = zip(times, self.each_s, strict=True)
        return [one._replace(reduce_s=seconds, reduce_slows=CONTENTION) for one, seconds in pairs]


def reduces_beside(parallelism: Parallelism, data: DataParallel) -> bool:
    """Whether a rank computes its other stages while gradients of one are reduced."""
    return parallelism.virtual_stages_per_rank > 1 and data.overlap == 1.0 and data.traits.reduce.beside_stages


def share_beside(virtual: int | Ints, traits: TraitColumns, overlap: float) -> Floats:
    """[N, 1] Of what comes with a stage's last backward pass, the share that is reduced beside the rank's other stages: 1 or 0.

    ``virtual``: stages of a rank; ``overlap``: 1 where collectives can run beside computation, else 0.
    """
    return traits.reduce.beside_stages * (virtual > 1) * (overlap == 1.0)
