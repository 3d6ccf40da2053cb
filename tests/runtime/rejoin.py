"""A rank of a test: joins in the launcher's order, then as a plan places it, and leaves what it was each time.

The last one takes its time before it joins anew; the others leave the first group only when it has come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from ahp.plan import Plan
from ahp.runtime.ranks.ranks import joined


@contextmanager
def left_late(came: Path) -> Iterator[None]:
    """Leaving a group in the block is an error before the last rank has come."""
    leave = dist.destroy_process_group

    def checked() -> None:
        assert came.exists(), "left while another may still connect"
        leave()

    with mock.patch.object(dist, "destroy_process_group", checked):
        yield


def main(arguments: list[str]) -> int:
    (folder,) = map(Path, arguments)
    plan = Plan.load(folder)
    with joined("cpu") as ranks:
        before = ranks.rank
        if before == ranks.size - 1:
            time.sleep(0.5)  # as one whose connections take longer
            (folder / "came").touch()
        with left_late(folder / "came"), joined("cpu", plan) as placed, joined("cpu", plan) as again:
            total = torch.tensor(placed.rank)
            dist.all_reduce(total)
            words = f"{before} {placed.rank} {again.rank} {total.item()}"
    (folder / f"worker-{os.environ['RANK']}").write_text(words)
    return 0
