"""Constants of CPU workers, of hosts and of overlap, with their provenance; they lie in constants.yaml."""

from __future__ import annotations

from collections.abc import Mapping

from ahp import shipped
from ahp.shipped import Constant


def constants() -> Mapping[str, Constant]:
    """All of constants.yaml, keyed by name."""
    return shipped.constants("ahp.forecast", "constants.yaml")


def value(name: str) -> float:
    """The shipped value of one constant, in the unit that constants.yaml gives. An unknown name is a programmer's error."""
    return constants()[name].value
