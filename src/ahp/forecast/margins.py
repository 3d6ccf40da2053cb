"""Constants that the forecast cannot derive and takes from measured runs: allocator, communicators, errors; in margins.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ahp.shipped import Constant, shipped


@dataclass(frozen=True, kw_only=True)
class Margin(Constant):
    """One constant with its provenance; the keys are explained at the top of margins.yaml."""

    devices: tuple[str, ...] = ()
    """Devices of the catalogue that the constant holds for; empty = all."""


@cache
def margins() -> Mapping[str, Margin]:
    """All of margins.yaml, keyed by name, read once."""
    return {name: Margin(**entry) for name, entry in shipped("ahp.forecast", "margins.yaml").items()}


def value(name: str) -> float:
    """The shipped value of one constant, in the unit that margins.yaml gives. An unknown name is a programmer's error."""
    return margins()[name].value
