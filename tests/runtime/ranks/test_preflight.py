"""Whoever does not answer before the first step is named, with its axis and host."""

from __future__ import annotations

import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ahp.plan import Parallelism
from ahp.runtime.ranks.mesh import build_mesh
from ahp.runtime.ranks.preflight import Hosts, NoAnswer, _exchange, preflight
from ahp.runtime.ranks.ranks import joined
from tests.runtime.workers import Pool


def meet(rank: int, world: int, trouble: str) -> str:
    """Runs in each worker; what rank 1 does wrong is the trouble. The error's words, empty without one."""
    layout = Parallelism(tensor_parallel_degree=2, data_parallel_replicate_degree=world // 2)
    mesh = build_mesh(layout, torch.device("cpu"))
    preflight(mesh)
    try:
        if rank == 1 and trouble == "absent":
            time.sleep(2.0)
        elif rank == 1 and trouble == "silent":  # it comes, and then hangs
            with mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("hangs")):
                preflight(mesh, answer_s=5.0)
        else:
            preflight(mesh, answer_s=1.0 if trouble == "absent" else 30.0, exchange_s=1.0)
    except NoAnswer as error:
        return str(error)
    return ""


def fail_alone(rank: int, port: int, tell: Connection) -> None:
    """One of two ranks. The other never comes to the exchange, and stays; rank 0 tells the error once its team has ended."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in variables.items()}
    try:
        with joined("cpu"):
            mesh = build_mesh(Parallelism(tensor_parallel_degree=2), torch.device("cpu"))
            preflight(mesh)
            hosts = Hosts(mesh)
            if rank == 1:
                signal.pause()
            hosts.meet(30.0)
            _exchange(mesh, "tp", hosts, 1.0)
    except NoAnswer as error:
        tell.send(str(error))
        signal.pause()


def test_all_answer(pool: Pool) -> None:
    assert pool.run(meet, 2, "none") == ["", ""]


def test_a_rank_that_does_not_come_is_named(pool: Pool) -> None:
    said = pool.run(meet, 2, "absent")[0]
    assert said.startswith("rank 1 of 2 did not come to the first exchange within 1 s")
    assert socket.gethostname() in said


@pytest.mark.slow
def test_an_axis_that_does_not_carry_is_named() -> None:
    """On workers of its own: gloo waits for the exchange that hangs when Python collects the group that it is of."""
    pool = Pool()
    try:
        said = pool.run(meet, 4, "silent")[0]
    finally:
        pool.close()
    assert said.startswith(f"axis tp, ranks 0, 1 on {socket.gethostname()}: an all-reduce of one number did not end")


@pytest.mark.slow
def test_an_error_is_told_though_an_exchange_hangs() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = Pool().context
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=fail_alone, args=(rank, port, theirs)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        assert ours.poll(60.0), "rank 0 waits for the exchange that hangs"
        assert ours.recv().startswith("axis tp, ranks 0, 1 on")
    finally:
        for process in ranks:
            process.kill()
            process.join()
