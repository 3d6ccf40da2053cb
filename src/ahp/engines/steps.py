"""Constants that were derived from measured steps of whole training runs, from steps.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ahp.shipped import shipped


@dataclass(frozen=True, kw_only=True)
class StepConstant:
    """One constant with its provenance; the keys are explained at the top of steps.yaml."""

    value: float
    unit: str
    meaning: str
    engines: tuple[str, ...]
    derived_from: tuple[str, ...]
    low: float
    high: float
    unknown: float

    def __post_init__(self) -> None:
        assert 0 < self.low <= min(self.value, self.unknown), self
        assert max(self.value, self.unknown) <= self.high, self


@cache
def constants() -> Mapping[str, StepConstant]:
    """All of steps.yaml by name, read once."""
    found = {}
    for name, entry in shipped("ahp.engines", "steps.yaml").items():
        engines, derived_from = tuple(entry.pop("engines")), tuple(entry.pop("derived_from"))
        found[name] = StepConstant(engines=engines, derived_from=derived_from, **entry)
    return found


def value(name: str) -> float:
    """The shipped value of one constant, in the unit that steps.yaml gives. An unknown name is a programmer's error."""
    return constants()[name].value
