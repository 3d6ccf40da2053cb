"""Starts the workers of a probe, follows what they print, and ends them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ahp.cluster.environment import with_ours
from ahp.errors import AhpError

POLL_S = 0.5
LAST_WORDS_LINES = 15


def results(settings: dict[str, Any], module: str = "ahp.cluster.worker") -> Iterator[dict[str, Any]]:
    """Run ``settings["workers"]`` workers of a module (see worker.py) and yield what rank 0 prints, line by line.

    Plain processes rather than ``multiprocessing``: that would import the caller's main module again in each, which
    a script without a main guard, a notebook or ``python -`` does not survive. Raises AhpError when a worker fails.
    """
    with tempfile.TemporaryDirectory(prefix="ahp-probe-") as folder:
        path = Path(folder, "settings.json")
        path.write_text(json.dumps({**settings, "store": str(Path(folder, "store"))}))
        logs = [Path(folder, f"worker{rank}.log") for rank in range(settings["workers"])]
        workers = [_start(module, rank, path, log) for rank, log in enumerate(logs)]
        try:
            yield from _follow(workers, logs)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
                if worker.stdout is not None:
                    worker.stdout.close()


def _start(module: str, rank: int, settings: Path, log: Path) -> subprocess.Popen[str]:
    environment = with_ours(dict(os.environ))
    # A worker finds this very package, even if it runs from a source tree that is not on the path.
    package_parent = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH")]))
    # If this process is part of a job, the variables of its launcher must not reach the workers' own process group.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            text=True,
        )


def _follow(workers: list[subprocess.Popen[str]], logs: list[Path]) -> Iterator[dict[str, Any]]:
    lines: queue.Queue[str | None] = queue.Queue()
    output = workers[0].stdout
    assert output is not None
    threading.Thread(target=_read, args=(output, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=POLL_S)
        except queue.Empty:
            _complain(workers, logs)
            continue
        if line is None:
            break
        if line.startswith("{"):  # anything else is some library's own printing
            yield json.loads(line)
    for worker in workers:
        worker.wait()
    _complain(workers, logs)


def _read(output: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _complain(workers: list[subprocess.Popen[str]], logs: list[Path]) -> None:
    for rank, worker in enumerate(workers):
        if worker.poll():
            last = "\n".join(logs[rank].read_text(errors="replace").splitlines()[-LAST_WORDS_LINES:])
            raise AhpError(f"probe: worker {rank} ended with code {worker.returncode}:\n{last}")
