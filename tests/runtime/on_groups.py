"""A worker whose host says by ``AHP_GROUP`` which group of a mixed cluster it is of; it writes down which rank it became."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ahp.plan import Plan
from ahp.runtime.ranks.device_order import GROUP
from ahp.runtime.ranks.ranks import joined
from ahp.runtime.run.worker import end_process


def main(folder: Path) -> int:
    worker = int(os.environ["RANK"])
    os.environ[GROUP] = ("old", "new")[worker % 2]
    with joined("cpu", Plan.load(folder / "plan.yaml")) as ranks:
        (folder / f"worker-{worker}").write_text(str(ranks.rank))
    return 0


if __name__ == "__main__":
    end_process(lambda: main(Path(sys.argv[1])))
