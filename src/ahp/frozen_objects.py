"""Whether a program keeps objects from Python's garbage collector."""

from __future__ import annotations

import gc

PYTHONS_OWN = 1000
"""More than Python freezes of its own: 3.12 starts with 375 frozen objects (3.12.1), other releases with none. A program that freezes has thousands."""


def has_frozen() -> bool:
    """Whether the program itself has frozen objects, besides those that Python starts with."""
    return gc.get_freeze_count() > PYTHONS_OWN
