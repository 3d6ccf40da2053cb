"""The data files that ship with the package, and constants with their provenance in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml


def shipped(package: str, name: str) -> Any:
    """A YAML file of a package. Read by libyaml if PyYAML has it, nine times as fast: a search of one node reads five."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(resources.files(package).joinpath(name).read_text(encoding="utf-8"), Loader=loader)


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number that was derived from measurements; the top of its file explains the keys."""

    value: float
    unit: str
    meaning: str
    derivation: str
    devices: tuple[str, ...] = ()
    """Devices of the catalogue that it holds for; empty = all."""

    def __post_init__(self) -> None:
        assert self.value > 0, self


@cache
def constants(package: str, name: str) -> Mapping[str, Constant]:
    """All constants of a file by name, read once."""
    return {key: Constant(**entry) for key, entry in shipped(package, name).items()}
