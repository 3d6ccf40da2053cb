"""What a schedule is made for: the seconds of each stage, the bytes it keeps, its rank, and the memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from ahp.errors import BadInput
from ahp.schedule.simulate import StageTimes

ROUNDING = 1e-9
"""Fraction of a rank's memory by which the sum of what it keeps may exceed that memory, for rounding."""


@dataclass(frozen=True)
class Problem:
    """Stages on ranks, and how many micro-batches go through them. All sequences are in pipeline order, except ``memory_bytes``."""

    times: tuple[StageTimes, ...]
    """Seconds of each stage. Sends between two stages of one rank are set to 0."""
    stage_rank: tuple[int, ...]
    """The pipeline rank that holds each stage."""
    num_micro_batches: int
    kept_bytes: tuple[float, ...] = ()
    """What one micro-batch keeps on each stage from its forward to its backward, or to its weight gradient; empty: nothing."""
    freed_bytes: tuple[float, ...] = ()
    """The part of ``kept_bytes`` that the input gradient frees, if the backward is split; empty: nothing."""
    memory_bytes: tuple[float, ...] = ()
    """What each rank has for kept bytes; empty: no rank has a limit."""
    split: bool = True
    """Whether input and weight gradients may run apart."""

    def __post_init__(self) -> None:
        """Fill in what was left out. Raises BadInput if lengths differ, or a rank cannot hold one micro-batch of all of its stages."""
        stages = len(self.times)
        for name, nothing in (("kept_bytes", 0.0), ("freed_bytes", 0.0)):
            object.__setattr__(self, name, tuple(getattr(self, name)) or (nothing,) * stages)
            if len(getattr(self, name)) != stages:
                raise BadInput(f"{name}: {len(getattr(self, name))} values for {stages} stages")
        object.__setattr__(self, "times", tuple(self._sending_between_ranks(s) for s in range(stages)))
        object.__setattr__(self, "memory_bytes", tuple(self.memory_bytes) or (inf,) * self.num_ranks)
        if len(self.stage_rank) != stages or set(self.stage_rank) != set(range(self.num_ranks)):
            raise BadInput(f"stage_rank = {list(self.stage_rank)}: {stages} stages, and every rank holds one at least")
        if len(self.memory_bytes) != self.num_ranks:
            raise BadInput(f"memory_bytes: {len(self.memory_bytes)} values for {self.num_ranks} ranks")
        for rank, (least, memory) in enumerate(zip(self.least_bytes, self.memory_bytes, strict=True)):
            if least > memory * (1 + ROUNDING):
                raise BadInput(
                    f"memory_bytes of rank {rank} = {memory:.0f}: one micro-batch of its stages keeps {least:.0f} at once"
                )

    def _sending_between_ranks(self, stage: int) -> StageTimes:
        ranks, times = self.stage_rank, self.times[stage]
        if stage + 1 < len(ranks) and ranks[stage] == ranks[stage + 1]:
            times = times._replace(send_forward_s=0.0)
        if stage > 0 and ranks[stage] == ranks[stage - 1]:
            times = times._replace(send_backward_s=0.0)
        return times

    @property
    def num_stages(self) -> int:
        return len(self.times)

    @property
    def num_ranks(self) -> int:
        return max(self.stage_rank) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank holds, lowest first."""
        return tuple(
            tuple(s for s, holder in enumerate(self.stage_rank) if holder == rank) for rank in range(self.num_ranks)
        )

    @cached_property
    def least_bytes(self) -> tuple[float, ...]:
        """What each rank keeps at once when a micro-batch turns at the last stage: every schedule needs that much."""
        return tuple(sum(self.kept_bytes[s] for s in own) for own in self.stages_of)
