"""A worker of a plan on hosts that were probed: it writes down which rank it became there, as each number that a launcher gives it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from ahp.plan import Plan
from ahp.runtime.ranks.ranks import joined
from ahp.runtime.run.worker import end_process


def main(plan: Path, folder: Path, *places: str) -> int:
    """``places``: NUMBER@ADDRESS:PORT, what a launcher tells the worker of a host of two, one after the other."""
    became = []
    for number, _, store in (place.partition("@") for place in places):
        address, _, port = store.rpartition(":")
        given = {"RANK": number, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update({**given, "MASTER_ADDR": address, "MASTER_PORT": port})
        with joined("cpu", Plan.load(plan)) as ranks:
            became.append(str(ranks.rank))
    (folder / socket.gethostname()).write_text(" ".join(became))
    return 0


if __name__ == "__main__":
    end_process(lambda: main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
