"""Constants that the forecast cannot derive and takes from measured runs: allocator, communicators, errors; in margins.yaml."""

from __future__ import annotations

from collections.abc import Mapping

from ahp import shipped
from ahp.shipped import Constant


def margins() -> Mapping[str, Constant]:
    """All of margins.yaml, keyed by name."""
    return shipped.constants("ahp.forecast", "margins.yaml")


def value(name: str) -> float:
    """The shipped value of one constant, in the unit that margins.yaml gives. An unknown name is a programmer's error."""
    return margins()[name].value
