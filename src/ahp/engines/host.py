"""What engines ask of the host at each operator and each unit of communication, with its provenance; it lies in host.yaml."""

from __future__ import annotations

from collections.abc import Mapping

from ahp import shipped
from ahp.shipped import Constant


def constants() -> Mapping[str, Constant]:
    """All of host.yaml by name."""
    return shipped.constants("ahp.engines", "host.yaml")


def value(name: str) -> float:
    """What ships for one constant, in the unit that host.yaml gives. An unknown name is a programmer's error."""
    return constants()[name].value
