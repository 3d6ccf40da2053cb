"""A worker whose host says by ``AHP_GROUP`` which group of a mixed cluster it is of; it writes down which rank it became."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from ahp.plan import Plan
from ahp.runtime.ranks.device_order import GROUP
from ahp.runtime.ranks.ranks import joined


def main(arguments: list[str]) -> int:
    (folder,) = map(Path, arguments)
    worker = int(os.environ["RANK"])
    if dist.is_initialized():  # a worker that is started anew is in no group
        dist.destroy_process_group()
    said = {GROUP: ("old", "new")[worker % 2]}
    with mock.patch.dict(os.environ, said), joined("cpu", Plan.load(folder / "plan.yaml")) as ranks:
        (folder / f"worker-{worker}").write_text(str(ranks.rank))
    return 0
