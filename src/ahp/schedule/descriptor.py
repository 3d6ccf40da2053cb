"""What a pipeline schedule is: one object that answers every question about it.

Here p = pipeline ranks, v = stages per rank, m = micro-batches. ``registry`` lists the schedules by name. The rest of AHP
compares no names: it asks the object. What all schedules have in common, and bounds and forecasts rely on:

- rank r's lowest stage is stage r, all ranks have the same number of stages, and stages take micro-batches in order;
- where the backward is whole, the last action of a rank is the last backward of its lowest stage;
- with one stage per rank, rank r holds at least min(p - r, m) micro-batches at once;
- ``passes_behind`` is at most p - 1, and 0 for the first p stages.

tests/schedule/test_registry.py holds each schedule to these, and its answers to its order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.schedule.actions import Action, Kind
from ahp.schedule.placement import Placement
from ahp.schedule.slots import Period, Slots


class PipelineSchedule(ABC):
    """One schedule, for any number of ranks, stages and micro-batches. A subclass must give only its name and its order: the default
    answers hold for any order, but are not the tightest or the fastest."""

    name: str
    """The value of ``pipeline_parallel_schedule``; torch's name where torch has it."""
    placement: Placement = Placement.LOOPED
    fewest_virtual: int = 1
    """Stages per rank, at least."""
    most_virtual: int | None = 1
    """Stages per rank, at most; None = any number."""
    splits_backward: bool = False
    """Whether weight gradients, of some micro-batches at least, are computed apart from and later than input gradients."""
    all_forwards_first: bool = False
    """Whether each rank does all its forwards before any backward. Needs one stage per rank and whole backwards; has closed forms."""
    one_forward_one_backward: bool = False
    """Whether, with one stage per rank, rank r starts forward i + p - r only after the gradient of micro-batch i; and, where
    the backward is split, from micro-batch r on only after a weight gradient too."""
    in_torch: bool = True
    """Whether ``torch.distributed.pipelining`` has it, under this name."""

    # -- order ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def rank_actions(self, rank: int, p: int, v: int, m: int) -> list[Action]:
        """The actions of one rank, in order; ``p``, ``v`` and ``m`` are legal."""

    def slots(self, p: int, v: int, m: int) -> Slots | None:
        """The order as a table in closed form; None = the table is made by simulation."""
        return None

    def period(self, p: int, v: int, m: int) -> Period | None:
        """How the rows of the table repeat; None = more micro-batches may have an entirely different order."""
        return None

    @property
    def gathers_ahead(self) -> bool:
        """Whether a rank asks for all its weights as the step begins, as torch's runtime does for schedules that allow several stages per rank;
        else it asks for each block's at its first forward (``pipeline_of_steps``)."""
        return self.most_virtual != 1

    # -- what is legal ----------------------------------------------------------------------------------------------

    def depths(self, free: Iterable[int]) -> list[int]:
        """Numbers of stages per rank above 1 that it can have: from ``free``, or its own range if that is bounded."""
        least = max(self.fewest_virtual, 2)
        return [v for v in (free if self.most_virtual is None else range(least, self.most_virtual + 1)) if v >= least]

    def runs(self, p: int, v: int, m: Ints, *, in_torch: bool) -> Mask:
        """For each number of micro-batches in ``m``: whether the schedule can run it; ``in_torch``: whether torch can."""
        return m >= 1

    def illegal(self, p: int, v: int, m: int, *, in_torch: bool = False) -> str | None:
        """Why there is no such schedule (key, value and rule); None if there is. ``in_torch``: why torch cannot run it."""
        if in_torch and not self.in_torch:
            return f"pipeline_parallel_schedule = {self.name!r}: torch.distributed.pipelining does not have it"
        if reason := self._illegal_stages(p, v):
            return reason
        return None if self.runs(p, v, np.asarray(m), in_torch=in_torch) else self.why_not(p, m)

    def why_not(self, p: int, m: int) -> str:
        """The reason when ``runs`` is False."""
        return f"pipeline_parallel_schedule = {self.name!r}: {p} ranks cannot run {m} micro-batches"

    def _illegal_stages(self, p: int, v: int) -> str | None:
        if p == 1 and self.most_virtual != 1 and max(v, self.fewest_virtual) > 1:
            return f"pipeline_parallel_schedule = {self.name!r}: needs pipeline_parallel_degree of 2 or more"
        if v >= self.fewest_virtual and (self.most_virtual is None or v <= self.most_virtual):
            return None
        given = f"virtual_stages_per_rank = {v}: {self.name}"
        if self.most_virtual == 1:
            return f"{given} runs one stage per rank (valid: 1, or pipeline_parallel_schedule Interleaved1F1B)"
        if self.most_virtual is None:
            first = self.fewest_virtual
            return f"{given} needs {first} or more stages per rank (valid: {first}, {first + 1}, ...)"
        valid = ", ".join(map(str, range(self.fewest_virtual, self.most_virtual + 1)))
        return f"{given} runs another number of stages per rank (valid: {valid})"

    # -- memory -----------------------------------------------------------------------------------------------------

    def in_flight(self, p: int, v: int, m: int) -> Ints:
        """[p, v] Micro-batches of each rank's stages, lowest stage first, held at a moment at or near the rank's fullest."""
        stages = self.placement.rank_stages(p, v)
        return np.array([self._fullest(rank, stages[rank].tolist(), p, m) for rank in range(p)], dtype=np.int64)

    def _fullest(self, rank: int, stages: list[int], p: int, m: int) -> list[int]:
        held = dict.fromkeys(stages, 0)
        most = list(held.values())
        for action in self.rank_actions(rank, p, len(stages), m):
            if action.kind is Kind.INPUT_GRADIENT:
                continue  # what the weight gradient needs is still kept
            held[action.stage] += 1 if action.kind is Kind.FORWARD else -1
            if sum(held.values()) > sum(most):
                most = list(held.values())
        return most

    # -- time -------------------------------------------------------------------------------------------------------

    def forwards_before_gradient(self, p: int, v: int, m: int) -> Ints | None:
        """[p, v] Forwards of each rank's stages before its first gradient, which is its highest stage's; for schedules where a rank's last
        gradient is its lowest stage's. None = no closed form is known."""
        return None

    def passes_behind(self, stage: int, p: int) -> int:
        """Backward passes that the rank computes between the last one of ``stage`` and the last one of its next stage."""
        return 0

    def num_split(self, stage: int, p: int, m: int) -> int:
        """Number of micro-batches whose backward the stage splits: always the last ones, or the first and the last ones."""
        return m if self.splits_backward else 0

    def fewest_deferred(self, p: int, v: int, m: int) -> int | Ints:
        """[S] The least number of weight gradients of each stage after its last input gradient, if it splits any."""
        return 1

    def last_weights_s(self, weight_s: Floats, p: int, v: int, m: int) -> tuple[Floats, bool | Mask]:
        """[N, p] The most seconds that each rank computes after the last input gradient of its lowest stage, and [p] whether
        no last weight gradient of its other stages is among them.

        ``weight_s``: [N, p, v] seconds of one weight gradient of each rank's stages.
        """
        return m * weight_s.sum(axis=-1), False
