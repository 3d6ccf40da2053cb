"""The data files that ship with the package, and constants with their provenance in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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


class Constants:
    """All constants of one file."""

    def __init__(self, package: str, name: str) -> None:
        self._file = package, name

    @cached_property
    def all(self) -> Mapping[str, Constant]:
        """The constants by name; the file is read on the first use."""
        return {key: Constant(**entry) for key, entry in shipped(*self._file).items()}

    def value(self, name: str) -> float:
        """The shipped value of one constant, in the unit that the file gives. An unknown name is a programmer's error."""
        return self.all[name].value
