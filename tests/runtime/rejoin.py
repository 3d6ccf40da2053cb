"""A rank of a test: joins in the launcher's order, then as a plan places it, and leaves what it was each time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ahp.plan import Plan
from ahp.runtime.ranks.ranks import joined


def main(folder: Path) -> None:
    plan = Plan.load(folder)
    with joined("cpu") as ranks:
        before = ranks.rank
        with joined("cpu", plan) as placed, joined("cpu", plan) as again:
            total = torch.tensor(placed.rank)
            dist.all_reduce(total)
            words = f"{before} {placed.rank} {again.rank} {total.item()}"
    (folder / f"worker-{os.environ['RANK']}").write_text(words)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
