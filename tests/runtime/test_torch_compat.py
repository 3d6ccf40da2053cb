"""Private PyTorch that only a look at what is left behind can check."""

from __future__ import annotations

import psutil

from tests.runtime.models import JOB
from tests.runtime.test_equality import LAYOUTS, train
from tests.runtime.workers import Pool


def num_threads(rank: int, world: int) -> int:
    return psutil.Process().num_threads()


def test_layouts_that_are_gone_leave_no_threads(pool: Pool) -> None:
    """The pool asks ``forget_meshes`` after each; without it gloo's threads of every group of the layout stay."""
    found = []
    for layout in ("1f1b", "tp"):  # the first, which has no mesh of weights, starts threads that are torch's own
        pool.run(train, 2, "llama", LAYOUTS[layout], 1, JOB)
        found.append(max(pool.run(num_threads, 2)))
    assert found[1] <= found[0] + 1, found  # a group has three
