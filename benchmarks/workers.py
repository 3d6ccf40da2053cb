"""Runs a function on a few processes of this machine that are joined by gloo.

The processes are forked from a server that has imported torch and transformers already: each measurement gets fresh
ones without paying for the import again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama",
    "ahp.runtime.parallelize",
]
JOIN_TIMEOUT_S = 300


class WorkerFailed(RuntimeError):
    """A worker ended without a result; the message holds its traceback."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(num_workers: int) -> int:
    """Threads of one worker: the cores are shared evenly, both sides of a comparison run in the same processes."""
    return max(1, num_cores() // num_workers)


def run(function: Callable[..., Any], *args: Any, num_workers: int = 2, timeout_s: float = 1800.0) -> Any:
    """``function(*args)`` on ``num_workers`` ranks of a gloo group; what rank 0 returned.

    ``function`` is a module's own, so that the processes can find it. Raises WorkerFailed when a worker fails or takes
    longer than ``timeout_s``; no process is left then.
    """
    threads = threads_each(num_workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ahp-benchmark-") as folder:
        started = []
        for rank in range(num_workers):
            ours, theirs = context.Pipe()
            job = (theirs, function, args, rank, num_workers, threads, f"{folder}/store")
            process = context.Process(target=_serve, args=job, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            return _collect([pipe for _, pipe in started], timeout_s)
        finally:
            for process, pipe in started:
                pipe.close()
                process.join(5.0)
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> Any:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerFailed(f"the workers did not finish within {timeout_s:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                ok, value = False, "the process ended (killed?)"
            if not ok:
                raise WorkerFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return results[0]


def _serve(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_workers: int,
    threads: int,
    store: str,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_workers,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        )
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send((True, value))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        sys.stderr.flush()
