"""How many examples a property test draws: a few in every run, thousands where somebody asks for them."""

from __future__ import annotations

import os


def many(usual: int) -> int:
    """``usual`` examples, times AHP_TEST_EXAMPLES where that is set: 50 of it make thousands of each property."""
    return usual * int(os.environ.get("AHP_TEST_EXAMPLES", "1"))
