"""All use of private transformers, so that a new release breaks one file. Written for 5.0 to 5.23."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MASKING = "transformers.masking_utils"


@contextmanager
def consecutive_positions() -> Iterator[None]:
    """Within, models that number the tokens of a sequence themselves do not look whether the numbers start again somewhere.

    They look at every forward, by a test of a tensor's values, for which the host waits until the device has done all that was queued before.
    Nothing looks, and nothing is changed, where transformers has not been imported.
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
    """What transformers answers for positions that do not start again."""
