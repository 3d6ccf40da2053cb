"""The pool of processes that tests of distributed code share: that of the benchmarks, with what these tests import."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import psutil

from ahp.runtime.ranks.launch import WorkersEnded
from ahp.runtime.ranks.own_store import store_on
from ahp.runtime.ranks.watch import Watch
from benchmarks import workers


class Pool(workers.Pool):
    PRELOAD = (*workers.PRELOAD, "tests.runtime.test_families", "tests.runtime.warm")

    def launch(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        num_workers: int,
        log_folder: Path,
        watch: Watch | None = None,
        stops_when: Callable[[], bool] | None = None,
    ) -> int:
        """In place of ``ahp.runtime.ranks.launch.launch``: workers that have found each other, and spend no seconds on imports. None hangs, and none
        is asked to stop. What a failed one said is where the launcher leaves it."""
        # As the launcher's: a port that is free now may be another program's when the first rank takes it.
        store = store_on("127.0.0.1", 0, option="the pool's store")
        try:
            codes = self.run(as_launched, num_workers, module, list(arguments), store.port, Path.cwd())
        except workers.WorkerFailed as error:
            said = log_folder / "pool" / "stderr.log"
            said.parent.mkdir(parents=True)
            said.write_text(str(error))
            raise WorkersEnded({0: 1}) from error
        assert codes == [0] * num_workers
        return 0


def as_launched(rank: int, world_size: int, module: str, arguments: list[str], port: int, folder: Path) -> int:
    """Runs in each worker: ``python -m module arguments`` in a folder under the launcher's variables."""
    kept_by_launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    variables = {**place(rank, world_size, port), **kept_by_launcher}
    with mock.patch.dict(os.environ, variables), contextlib.chdir(folder):
        return importlib.import_module(module).main(arguments)


def script_as_rank(rank: int, world_size: int, folder: Path, port: int, script: Path, arguments: list[str]) -> str:
    """Runs in each worker: a script in a folder as torchrun would start it; what it prints."""
    import torch.distributed as dist

    dist.destroy_process_group()
    with mock.patch.dict(os.environ, place(rank, world_size, port)), contextlib.chdir(folder):
        return said_by(script, *arguments)


def said_by(script: Path, *arguments: str) -> str:
    """What it prints, run in this process."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", [str(script), *arguments]), contextlib.redirect_stdout(out):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def place(rank: int, world_size: int, port: int = 0) -> dict[str, str]:
    """The launcher's variables of a rank on this machine."""
    found = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in found.items()}


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def listened_on() -> set[str]:
    """ADDRESS:PORT of every TCP socket that this process or one that it has started waits for connections on."""
    this = psutil.Process()
    found = [each.net_connections("tcp") for each in (this, *this.children(recursive=True))]
    return {f"{one.laddr.ip}:{one.laddr.port}" for each in found for one in each if one.status == psutil.CONN_LISTEN}
