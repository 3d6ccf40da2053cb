"""Constants of CPU workers, of hosts and of what runs side by side, with their provenance; they lie in constants.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ahp.shipped import shipped


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The keys are explained at the top of constants.yaml."""

    value: float
    unit: str
    meaning: str
    derivation: str

    def __post_init__(self) -> None:
        assert self.value > 0, self


@cache
def constants() -> Mapping[str, Constant]:
    """All of constants.yaml by name, read once."""
    return {name: Constant(**entry) for name, entry in shipped("ahp.forecast", "constants.yaml").items()}


def value(name: str) -> float:
    """What ships for one constant, in the unit that constants.yaml gives. An unknown name is a programmer's error."""
    return constants()[name].value
