"""Processes of this machine that are joined by gloo, for measurements here and for the tests of the runtime.

They are forked from a server that has imported torch and transformers already, so that none pays for the import again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ahp.cluster.environment import COMPUTE

PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "ahp.runtime.weights.saver",
    "ahp.runtime.parallel",
]
JOIN_TIMEOUT_S = 120
"""[Empirical] For a single collective. A rank waits for another's first step, which takes seconds, not minutes. A hang must be
reported before the caller's own time limit."""


RUNS_OF_A_WORKER = 500
"""[Empirical] gloo's threads of each group that is left behind wake a hundred times a second: a worker that kept all had 500 after a
hundred layouts, and the machine did little else. With ``forget_meshes`` it has 4 after 160 layouts, and 25 MB more memory. A new worker
takes a third of a second, and its first layouts up to twice as long as when it knows the model."""


class WorkerFailed(AssertionError):
    """A worker ended without a result; the message holds its traceback."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(num_workers: int) -> int:
    """Threads of one worker: the cores are shared evenly, both sides of a comparison run in the same processes."""
    return max(1, num_cores() // num_workers)


def run(function: Callable[..., Any], *args: Any, num_workers: int = 2, timeout_s: float = 1800.0) -> Any:
    """``function(*args)`` on so many fresh workers, which share the cores; what rank 0 returned.

    Raises WorkerFailed when a worker fails or takes longer than ``timeout_s``; no process is left then.
    """
    pool = Pool(threads=threads_each(num_workers), timeout_s=timeout_s)
    try:
        return pool.run(_without_place, num_workers, function, args)[0]
    finally:
        pool.close()


def _without_place(rank: int, num_workers: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


class Pool:
    """Workers that are started when first needed and kept for some runs; a new gloo group for each ``run``."""

    PRELOAD: Sequence[str] = PRELOAD

    def __init__(self, *, threads: int = 1, timeout_s: float = 300.0) -> None:
        self.threads, self.timeout_s = threads, timeout_s
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(self.PRELOAD))
        self.workers: list[tuple[Any, Connection]] = []
        self.num_runs = 0

    def run(self, function: Callable[..., Any], num_workers: int, *args: Any) -> list[Any]:
        """``function(rank, num_workers, *args)`` on each of so many workers; their results by rank.

        ``function`` is a module's own, so that the processes can find it. Raises WorkerFailed with the traceback of the
        first worker that fails, or when they take longer than ``timeout_s``; all workers are ended then.
        """
        if self.num_runs == RUNS_OF_A_WORKER:
            self.close()
        self.num_runs += 1
        while len(self.workers) < num_workers:
            self.workers.append(self._start())
        with tempfile.TemporaryDirectory(prefix="ahp-workers-") as folder:
            used = self.workers[:num_workers]
            for rank, (_, pipe) in enumerate(used):
                pipe.send((function, rank, num_workers, f"{folder}/store", args))
            try:
                return self._collect([pipe for _, pipe in used])
            except WorkerFailed:
                self.close()
                raise

    def close(self) -> None:
        """End every worker, whatever it does."""
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers.clear()
        self.num_runs = 0

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.threads), daemon=True)
        # The fork server does not get this process's import path (Python 3.11), and ignores modules that it does not find.
        variables = {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": os.pathsep.join(sys.path)}
        variables |= {name: value for name, value in COMPUTE.items() if name not in os.environ}
        if Path("/sys/class/net/lo").exists() and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        with _environment(variables):
            process.start()
        theirs.close()
        return process, ours

    def _ask_where(self) -> None:
        """Let every worker write its stack to stderr."""
        for process, _ in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def _collect(self, pipes: list[Connection]) -> list[Any]:
        results: list[Any] = [None] * len(pipes)
        pending = {pipe: rank for rank, pipe in enumerate(pipes)}
        deadline = time.monotonic() + self.timeout_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._ask_where()
                raise WorkerFailed(f"workers {sorted(pending.values())} did not finish within {self.timeout_s:.0f} s")
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process ended (killed?)"
                if not ok:
                    raise WorkerFailed(f"rank {rank}:\n{value}")
                results[rank] = value
        return results


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables for a process that is started meanwhile; the server of forks hands over those of its own start."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


def _serve(pipe: Connection, threads: int) -> None:
    import torch
    import torch.distributed as dist

    from ahp.runtime.torch_compat import forget_meshes

    faulthandler.register(signal.SIGUSR1)  # on stderr, where this process is: `_collect` asks
    torch.set_num_threads(threads)
    while True:
        try:
            function, rank, num_workers, store, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=num_workers,
                timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            )
            dist.barrier()  # else one that leaves at once, to join in another way, breaks off those that still connect to it
            value = function(rank, num_workers, *args)
            if dist.is_initialized():  # ranks that joined anew, in another order, have left already
                dist.barrier()
                dist.destroy_process_group()
            forget_meshes()
            gc.collect()  # a layout's parts refer to each other
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return
