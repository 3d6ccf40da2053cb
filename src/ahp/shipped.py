"""The data files that ship with the package."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml


def shipped(package: str, name: str) -> Any:
    """A YAML file of a package. Read by libyaml where PyYAML has it, nine times as fast: a search of one node reads five."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(resources.files(package).joinpath(name).read_text(encoding="utf-8"), Loader=loader)
