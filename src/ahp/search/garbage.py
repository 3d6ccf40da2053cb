"""A search makes many small objects, at which Python looks for cycles through all that the process holds: torch's modules, mostly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def among_new_objects() -> Iterator[None]:
    """Garbage is looked for among objects made while this is open; those that were there before are as they were afterwards.

    What somebody has frozen stays frozen: then, and in a search that a search starts, this does nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
