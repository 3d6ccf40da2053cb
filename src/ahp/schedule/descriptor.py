"""What a pipeline schedule is: one object that answers every question about it.

Here p = pipeline ranks, v = stages per rank, m = micro-batches. ``registry`` lists the schedules by name. The rest of AHP
compares no names: it asks the object. What all schedules have in common, and bounds and forecasts rely on:

- rank r's lowest stage is stage r, stages take micro-batches in order, and all stages of a rank hold as many micro-batches;
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
    """One schedule, for any number of ranks, stages and micro-batches. Only its name and its order must be given: the other
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
    """Whether no rank begins a backward before it has done all its forwards. Needs one whole stage per rank; there are closed forms."""
    one_forward_one_backward: bool = False
    """Whether, with one stage per rank, rank r starts forward i + p - r only after the gradient of micro-batch i; and, where
    the backward is split, from micro-batch r on only after a weight gradient too."""
    in_torch: bool = True
    """Whether ``torch.distributed.pipelining`` has it, under this name."""

    # -- order ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def rank_actions(self, rank: int, p: int, v: int, m: int) -> list[Action]:
        """The actions of one rank, in order; the layout is legal."""

    def slots(self, p: int, v: int, m: int) -> Slots | None:
        """The order as a table in closed form; None = it is simulated."""
        return None

    def period(self, p: int, v: int, m: int) -> Period | None:
        """How the rows of the table repeat; None = the order of more micro-batches may be quite another one."""
        return None

    @property
    def gathers_ahead(self) -> bool:
        """Whether all weights of a rank are asked for as the step begins, as torch's runtime does it for schedules that may have several stages on
        a rank; else each block's are when its first forward comes (``pipeline_of_steps``)."""
        return self.most_virtual != 1

    # -- what is legal ----------------------------------------------------------------------------------------------

    def depths(self, free: Iterable[int]) -> list[int]:
        """Numbers of stages per rank above 1 that it can have: of ``free``, or its own where these are few."""
        least = max(self.fewest_virtual, 2)
        return [v for v in (free if self.most_virtual is None else range(least, self.most_virtual + 1)) if v >= least]

    def runs(self, p: int, v: int, m: Ints, *, in_torch: bool) -> Mask:
        """Whether it orders so many micro-batches, each number of ``m``; ``in_torch``: whether torch does."""
        return m >= 1

    def illegal(self, p: int, v: int, m: int, *, in_torch: bool = False) -> str | None:
        """Why there is no such schedule, key, value and rule; None if there is. ``in_torch``: why torch cannot run it."""
        if in_torch and not self.in_torch:
            return f"pipeline_parallel_schedule = {self.name!r}: torch.distributed.pipelining does not have it"
        if reason := self._illegal_stages(p, v):
            return reason
        return None if self.runs(p, v, np.asarray(m), in_torch=in_torch) else self.why_not(p, m)

    def why_not(self, p: int, m: int) -> str:
        """The reason where ``runs`` says no."""
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
        """Micro-batches of each rank's stages, lowest stage first, held at one moment at or near its fullest: [p, v]."""
        stages = self.placement.rank_stages(p, v)
        return np.array([self._fullest(rank, stages[rank].tolist(), p, m) for rank in range(p)], dtype=np.int64)

    def _fullest(self, rank: int, stages: list[int], p: int, m: int) -> list[int]:
        held = dict.fromkeys(stages, 0)
        most = list(held.values())
        for action in self.rank_actions(rank, p, len(stages), m):
            if action.kind is Kind.INPUT_GRADIENT:
                continue  # what the weight gradient needs is still there
            held[action.stage] += 1 if action.kind is Kind.FORWARD else -1
            if sum(held.values()) > sum(most):
                most = list(held.values())
        return most

    # -- time -------------------------------------------------------------------------------------------------------

    def forwards_before_gradient(self, p: int, v: int, m: int) -> Ints | None:
        """Forwards of each rank's stages before its first gradient, which is of its highest stage, [p, v]; where the last gradient of a rank
        is of its lowest stage. None = it is not known in closed form."""
        return None

    def passes_behind(self, stage: int, p: int) -> int:
        """Backward passes that the rank computes after the last one of a stage, before the last of its next stage."""
        return 0

    def num_split(self, stage: int, p: int, m: int) -> int:
        """Micro-batches whose backward the stage splits; always the last ones, or the first ones and the last."""
        return m if self.splits_backward else 0

    def fewest_deferred(self, p: int, v: int, m: int) -> int | Ints:
        """Weight gradients of each stage that surely follow its last input gradient, [S]; where it splits any."""
        return 1

    def last_weights_s(self, weight_s: Floats, p: int, v: int, m: int) -> tuple[Floats, bool | Mask]:
        """At most what each rank computes after the last input gradient of its lowest stage, [N, p] seconds, and whether
        no last weight gradient of its other stages is among it, [p].

        ``weight_s``: [N, p, v] seconds of a weight gradient of each rank's stages.
        """
        return m * weight_s.sum(axis=-1), False
