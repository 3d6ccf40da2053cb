"""A worker of a plan on hosts that were probed: it writes down which rank it became there."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from ahp.plan import Plan
from ahp.runtime.ranks.ranks import joined
from ahp.runtime.run.worker import end_process


def main(plan: Path, folder: Path) -> int:
    with joined("cpu", Plan.load(plan)) as ranks:
        (folder / socket.gethostname()).write_text(str(ranks.rank))
    return 0


if __name__ == "__main__":
    end_process(lambda: main(Path(sys.argv[1]), Path(sys.argv[2])))
