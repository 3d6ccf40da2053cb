"""Whether a program keeps objects from Python's garbage collector."""

from __future__ import annotations

import gc

PYTHONS_OWN = 1000
"""Python 3.12 starts with 375 objects of its own frozen (3.12.1), other releases with none. A program that freezes has thousands."""


def has_frozen() -> bool:
    """Whether the program has frozen objects itself, beside those that Python starts with."""
    return gc.get_freeze_count() > PYTHONS_OWN
