"""A rank of a test: joins in the launcher's order, then as a plan places it, and leaves what it was each time."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from ahp.plan import Plan
from ahp.runtime.ranks.ranks import joined


def main(arguments: list[str]) -> int:
    (folder,) = map(Path, arguments)
    plan = Plan.load(folder)
    with joined("cpu") as ranks:
        before = ranks.rank
        with joined("cpu", plan) as placed, joined("cpu", plan) as again:
            total = torch.tensor(placed.rank)
            dist.all_reduce(total)
            words = f"{before} {placed.rank} {again.rank} {total.item()}"
    (folder / f"worker-{os.environ['RANK']}").write_text(words)
    return 0
