"""A worker of a test: joins a run whose preparation takes longer than its collectives wait, or fails, or is killed."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from ahp.errors import AhpError, BadInput
from ahp.plan import Plan
from ahp.runtime.ranks import ranks
from ahp.runtime.ranks.preparation import Preparation
from ahp.runtime.run import trainer

LIMIT_S = 10.0
"""Of the group that ranks join: two ranks find each other within it on a machine that is busy, too."""


class Slow(trainer.Trainer):
    what = ""

    def _texts(self) -> trainer.Texts:
        assert os.environ["RANK"] == "0"
        if self.what == "long":
            assert not dist.is_initialized()
            time.sleep(LIMIT_S + 2)
        if self.what == "fails":
            raise BadInput("the text is bad")
        if self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._texts()


def as_rank(rank: int, world: int, folder: Path, what: str, variables: list[dict[str, str]]) -> tuple[int, str]:
    """Runs in each worker of a pool, with the variables of its rank: exit code, and what it says on stderr."""
    dist.destroy_process_group()
    said = io.StringIO()
    with mock.patch.dict(os.environ, variables[rank]), contextlib.redirect_stderr(said):
        try:
            return main(folder, what), said.getvalue()
        except SystemExit as ended:
            return int(ended.code or 0), said.getvalue()


@mock.patch.object(ranks, "COLLECTIVE_TIMEOUT_S", LIMIT_S)
def main(folder: Path, what: str) -> int:
    if what == "killed":
        trainer.Preparation = partial(Preparation, heartbeat_s=0.5, silent_s=8.0)  # type: ignore[assignment,misc]
    Slow.what = what
    try:
        return Slow(Plan.load(folder / "plan.yaml"), folder=folder / "run").run().exit_code
    except AhpError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
