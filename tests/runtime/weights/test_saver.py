"""What the thread that writes checkpoints does beside the main thread's steps."""

from __future__ import annotations

import threading
from unittest import mock

import torch._ops as modes

from tests.runtime.models import BUILDERS, JOB
from tests.runtime.workers import Pool


def looks_beside(rank: int, world: int) -> list[str]:
    """Runs in each worker: the threads but the main one that looked at the modes of tracing while memory for checkpoints was made."""
    from ahp.runtime.parallel import parallelize

    layout = {"data_parallel_shard_degree": 2, "micro_batch_size": 4}
    parallel = parallelize(BUILDERS["llama"](), {"job": JOB, "parallelism": layout})
    found: list[str] = []
    state = modes.mode_stack_state_for_pre_dispatch

    def looked() -> object:
        if threading.current_thread() is not threading.main_thread():
            found.append(threading.current_thread().name)
        return state()

    with mock.patch.object(modes, "mode_stack_state_for_pre_dispatch", looked):
        parallel.saver.thread.submit(int).result()  # after the memory
    return found


def test_memory_for_checkpoints_is_made_without_touching_the_tracing_of_other_threads(
    pool: Pool,
) -> None:
    """torch has one stack of modes for all threads. An operator of a DTensor takes the tracing off it for a moment, and a first step that
    traced a block just then ended with an AssertionError."""
    assert pool.run(looks_beside, 2) == [[], []]
