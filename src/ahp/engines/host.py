"""Host work of engines for each operator and each unit of communication, with its provenance, from host.yaml."""

from __future__ import annotations

from collections.abc import Mapping

from ahp import shipped
from ahp.shipped import Constant


def constants() -> Mapping[str, Constant]:
    """All of host.yaml by name."""
    return shipped.constants("ahp.engines", "host.yaml")


def value(name: str) -> float:
    """The shipped value of one constant, in the unit that host.yaml gives. An unknown name is a programmer's error."""
    return constants()[name].value
