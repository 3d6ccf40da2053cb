"""Ranks join again after an attempt that ended, with the limit that they are given, and name those that do not come."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ahp.runtime.ranks import ranks
from ahp.runtime.ranks.meeting import NoAnswer
from tests.runtime.workers import Pool, free_port, place

LIMIT_S = 2.0


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store as torchrun's agent keeps it, for all attempts of its workers."""
    found = free_port()
    store = dist.TCPStore("127.0.0.1", found, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield found
    del store


def variables(rank: int, world: int, port: int, attempt: int) -> dict[str, str]:
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    return {**place(rank, world, port), **given}


def leave_the_pools_group() -> None:
    dist.barrier()  # one that left would close what another still connects to
    dist.destroy_process_group()


def join(rank: int, world: int, port: int, attempt: int, *, leave: bool) -> float:
    """Runs in each worker: the sum of all ranks; the group is left, or not, as by one that is killed."""
    leave_the_pools_group()
    with mock.patch.dict(os.environ, variables(rank, world, port, attempt)):
        joining = ranks.joined("cpu", collective_timeout_s=30.0)
        joining.__enter__()
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        if leave:
            joining.__exit__(None, None, None)
        else:
            KEPT.append(joining)
    return total.item()


def killed(rank: int, world: int, port: int) -> float:
    return join(rank, world, port, 0, leave=False)


def started_again(rank: int, world: int, port: int) -> float:
    return join(rank, world, port, 1, leave=True)


KEPT: list[object] = []
"""Of the worker that is killed, so that its group stays."""


@pytest.mark.slow
def test_workers_that_are_started_again_join_over_the_store_of_those_that_ended(port: int) -> None:
    """The store has the addresses still at which nobody listens any more."""
    for attempt in (killed, started_again):
        workers = Pool(timeout_s=60.0)
        try:
            assert workers.run(attempt, 3, port) == [3.0] * 3
        finally:
            workers.close()


def waits_alone(rank: int, world: int, port: int) -> str:
    leave_the_pools_group()
    if rank == 1:
        return ""
    environment = mock.patch.dict(os.environ, variables(rank, world, port, 0))
    with environment, mock.patch.object(ranks, "MEET_S", 1.0), pytest.raises(NoAnswer) as error, ranks.joined("cpu"):
        pass
    return str(error.value)


def test_a_rank_that_never_joins_is_named(pool: Pool, port: int) -> None:
    said = pool.run(waits_alone, 2, port)[0]
    assert said.startswith("rank 1 of 2 did not come to the start of the job within 1 s; rank 0 did, on ")
    assert socket.gethostname() in said


def receives_in_vain(rank: int, world: int, port: int) -> float:
    """Seconds that a receive of the job's own group takes to fail."""
    leave_the_pools_group()
    with mock.patch.dict(os.environ, variables(rank, world, port, 0)):
        joining = ranks.joined("cpu", collective_timeout_s=LIMIT_S)
        joining.__enter__()
        began_s = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError, match=f"{LIMIT_S * 1000:.0f}ms"):
                dist.recv(torch.ones(1), src=1)
        took_s = time.monotonic() - began_s
        ranks.meet(ranks.default_store(), rank, world, at="end", within_s=30.0)
        dist.destroy_process_group()
    return took_s


def test_sends_and_receives_wait_no_longer_than_the_limit_of_the_run(pool: Pool, port: int) -> None:
    assert pool.run(receives_in_vain, 2, port)[0] >= LIMIT_S
