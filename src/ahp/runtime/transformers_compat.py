"""All use of private transformers, so that a new release breaks one file. Written for 5.0 to 5.23."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MASKING = "transformers.masking_utils"


@contextmanager
def consecutive_positions() -> Iterator[None]:
    """Within, models that number the tokens of a sequence themselves do not check whether the positions restart somewhere.

    The check runs at every forward and tests a tensor's values, so the host waits until the device has done all queued work.
    If transformers has not been imported, nothing checks and nothing is changed.
    """
    module: Any = sys.modules.get(MASKING)
    look = getattr(module, "find_packed_sequence_indices", None)
    if look is None:
        yield
        return
    module.find_packed_sequence_indices = _none_packed
    try:
        yield
    finally:
        module.find_packed_sequence_indices = look


def _none_packed(position_ids: Any) -> None:
    """What transformers returns for positions that do not restart."""
