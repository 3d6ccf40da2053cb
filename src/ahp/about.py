"""The package's version, and its name where pip looks for it."""

from __future__ import annotations

__version__ = "0.2.0"
DISTRIBUTION = "adaptive-hybrid-parallelism"
"""The package's name for pip, where ``ahp`` is another program."""


def install_extra(name: str) -> str:
    """What to do if a library is missing that an extra of the package brings."""
    return f"install the extra: pip install '{DISTRIBUTION}[{name}]'"
