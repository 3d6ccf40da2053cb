"""Whoever does not answer before the first step is named, with its axis and host."""

from __future__ import annotations

import socket
import time
from unittest import mock

import torch
import torch.distributed as dist

from ahp.plan import Parallelism
from ahp.runtime.mesh import build_mesh
from ahp.runtime.preflight import NoAnswer, preflight
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


def test_all_answer(pool: Pool) -> None:
    assert pool.run(meet, 2, "none") == ["", ""]


def test_a_rank_that_does_not_come_is_named(pool: Pool) -> None:
    said = pool.run(meet, 2, "absent")[0]
    assert said.startswith("rank 1 of 2 did not come to the first exchange within 1 s")
    assert socket.gethostname() in said


def test_an_axis_that_does_not_carry_is_named(pool: Pool) -> None:
    said = pool.run(meet, 4, "silent")[0]
    assert said.startswith(f"axis tp, ranks 0, 1 on {socket.gethostname()}: an all-reduce of one number did not end")
