"""The actions of a pipeline schedule, in order for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes, under the letters that torch.distributed.pipelining uses."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: input gradient and weight gradient."""
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


PlainAction = tuple[str, int, int]
"""An action, or its letter, stage and micro-batch as a plain tuple, which is faster to make."""


@dataclass(frozen=True)
class Schedule:
    """The order in which each rank runs its actions; an action waits until its inputs from other ranks have arrived."""

    name: str
    num_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    """``stage_rank[s]``: the pipeline rank that holds stage ``s``."""
