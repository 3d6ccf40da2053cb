"""A pool of processes for tests of distributed code: started once, a fresh gloo group for each case.

Forked from a server that has imported torch and transformers already, so that a worker costs no import.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "transformers.models.llama", "transformers.models.gpt2",
           "ahp.runtime.parallelize", "torch.distributed.checkpoint"]  # fmt: skip


class WorkerError(AssertionError):
    """A worker failed; the message holds its traceback."""


class Pool:
    """``run(function, world_size, *args)`` calls ``function(rank, world_size, *args)`` in that many processes."""

    def __init__(self, size: int, timeout_s: float = 300.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Results by rank. Raises WorkerError with the first failing worker's traceback; the pool starts anew then."""
        while len(self.workers) < world_size:
            self.workers.append(self._start())
        with tempfile.TemporaryDirectory() as folder:
            used = self.workers[:world_size]
            for rank, (_, pipe) in enumerate(used):
                pipe.send((function, rank, world_size, f"{folder}/store", args))
            return self._collect(used)

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
        with _environment(OMP_NUM_THREADS="1"):
            process.start()
        theirs.close()
        return process, ours

    def _collect(self, used: list[tuple[Any, Connection]]) -> list[Any]:
        results: list[Any] = [None] * len(used)
        pending = {pipe: rank for rank, (_, pipe) in enumerate(used)}
        deadline = time.monotonic() + self.timeout_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerError(f"workers {sorted(pending.values())} did not finish within {self.timeout_s} s")
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process ended"
                if not ok:
                    self.close()
                    raise WorkerError(f"rank {rank}:\n{value}")
                results[rank] = value
        return results

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers.clear()


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, rank, world_size, store, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
            )
            value = function(rank, world_size, *args)
            dist.barrier()
            dist.destroy_process_group()
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return
