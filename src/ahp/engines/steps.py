"""Constants that were derived from measured steps of whole training runs, from steps.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ahp.shipped import Constant, shipped


@dataclass(frozen=True, kw_only=True)
class StepConstant(Constant):
    """A constant that is fitted to rows of measured steps; the keys are explained at the top of steps.yaml."""

    engines: Sequence[str]
    derived_from: Sequence[str]
    low: float
    high: float
    unknown: float

    def __post_init__(self) -> None:
        assert 0 < self.low <= min(self.value, self.unknown), self
        assert max(self.value, self.unknown) <= self.high, self


@cache
def constants() -> Mapping[str, StepConstant]:
    """All of steps.yaml by name, read once."""
    return {name: StepConstant(**entry) for name, entry in shipped("ahp.engines", "steps.yaml").items()}


def value(name: str) -> float:
    """The shipped value of one constant, in the unit that steps.yaml gives. An unknown name is a programmer's error."""
    return constants()[name].value
