"""What ``ahp plan`` would gain from treating a slow rank's device, or its node's links, as slow; ``python -m ahp.runtime.run.slow_plan FOLDER RANK RATIO
REASON``.

A search takes seconds of processor time: the first worker starts it as a separate process at the lowest priority, without the GPUs, and
checks now and then whether it is over. It writes ``slow-cluster.yaml``, from which the user can plan again, and one JSON object on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from ahp.plan import Plan
from ahp.runtime.run.folder import RunFolder

LOWEST_PRIORITY = 19
CLUSTER = "slow-cluster.yaml"
"""File in the run's folder."""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would make the search one of the ranks."""


class SlowPlan:
    """One search that runs next to training."""

    def __init__(self, folder: RunFolder, rank: int, ratio: float, reason: str) -> None:
        """``reason``: as in ``SlowRank``."""
        self.rank = rank
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
        self.answer: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ahp.runtime.run.slow_plan", str(folder.path), str(rank), repr(ratio), reason],
            stdin=subprocess.DEVNULL,
            stdout=self.answer,
            stderr=subprocess.DEVNULL,
            env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )

    def read(self) -> dict[str, Any] | None:
        """The result once the search is over: figures, with ``words`` for people, or ``error``. None until then."""
        if self.process.poll() is None:
            return None
        self.answer.seek(0)
        try:
            return json.loads(self.answer.read())
        except ValueError:
            return {"error": f"the search ended with code {self.process.returncode}"}

    def close(self) -> None:
        """End the search, whether it is over or not."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.answer.close()


def main(argv: list[str]) -> int:
    """Search, and print what was found."""
    os.nice(LOWEST_PRIORITY)
    from ahp.errors import AhpError

    try:
        found = _found(Path(argv[0]), int(argv[1]), float(argv[2]), argv[3])
    except AhpError as error:
        found = {"error": str(error).splitlines()[0]}
    print(json.dumps(found))
    return 0


def _found(folder: Path, rank: int, ratio: float, reason: str) -> dict[str, Any]:
    from ahp.search.problem import problem_of
    from ahp.search.slowed import gain

    plan = Plan.load(folder / "plan.yaml")  # nobody asks about a plan without a cluster
    # A device whose rows come late takes longer for each row, like a device that computes slowly.
    slowed = gain(problem_of(plan), plan, rank, ratio, network=reason == "network")
    slowed.cluster.save(folder / CLUSTER)
    return slowed.plain()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
