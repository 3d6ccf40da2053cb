"""Before the first step, the ranks of every mesh axis exchange one number, so that ranks that do not answer are named.

Without this the first collective of the run would wait until its own time-out for a rank that never comes, and then report
only that a peer is silent.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from ahp.errors import first_line
from ahp.runtime.ranks.meeting import MEET_S, NoAnswer, absent, named
from ahp.runtime.ranks.mesh import AXES, Mesh
from ahp.runtime.ranks.torch_compat import default_store

EXCHANGE_S = 60.0
"""Limit of one all-reduce of one number. The first on an axis also makes NCCL's communicator: seconds for a thousand ranks."""


def preflight(mesh: Mesh, *, answer_s: float = MEET_S, exchange_s: float = EXCHANGE_S) -> Hosts:
    """Let all ranks meet, then all-reduce one number along each axis. Collective. Returns the ranks that came, and their hosts.

    Raises NoAnswer with the ranks that did not come within ``answer_s``, or with the axis on which an exchange failed or took
    longer than ``exchange_s``, and the ranks and hosts on it.
    """
    hosts = Hosts(mesh)
    hosts.meet(answer_s)
    for axis in (*AXES, "ep"):
        if mesh.size(axis) > 1:
            _exchange(mesh, axis, hosts, exchange_s)
    return hosts


class Hosts:
    """The ranks on this rank's axes, and their hosts. Other ranks are left to their own neighbors: with thousands of ranks, all
    waiting for all would be too much for the store."""

    def __init__(self, mesh: Mesh) -> None:
        self.store, rank = default_store(), dist.get_rank()
        found = {other for axis in AXES for other in dist.get_process_group_ranks(mesh.group(axis))}
        self.ranks = sorted(found | {rank})
        time = self.store.add(f"ahp/preflight/{rank}", 1)  # a process can do this several times, all equally often
        self.prefix = f"ahp/preflight/{time}"
        self.keys = {other: f"{self.prefix}/{other}" for other in self.ranks}
        self.store.set(self.keys[rank], socket.gethostname())

    def meet(self, answer_s: float) -> None:
        """Wait for all ranks on this rank's axes."""
        try:
            self.store.wait(list(self.keys.values()), timedelta(seconds=answer_s))
        except RuntimeError:
            missing = absent(self.store, self.keys)
            there = [rank for rank in self.ranks if rank not in missing]
            raise NoAnswer(
                f"{named(missing)} of {dist.get_world_size()} did not come to the first exchange within {answer_s:.0f} s; "
                f"{named(there)} did, on {self.of(there)}. The logs of those that are missing say where they hang or why "
                "they ended",
                missing,
            ) from None

    def of(self, ranks: list[int]) -> str:
        """The hosts of ranks that have come, on any axis, each listed once."""
        return ", ".join(dict.fromkeys(self.store.get(f"{self.prefix}/{rank}").decode() for rank in ranks))


def _exchange(mesh: Mesh, axis: str, hosts: Hosts, exchange_s: float) -> None:
    group = mesh.group(axis)
    ranks = dist.get_process_group_ranks(group)
    one = torch.ones((), dtype=torch.float32, device=mesh.device)
    wrong = None
    try:
        work = dist.all_reduce(one, group=group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=exchange_s))
        if (total := one.item()) != len(ranks):
            wrong = f"an all-reduce of ones gave {total}, not {len(ranks)}"
    except RuntimeError as error:
        wrong = f"an all-reduce of one number did not end within {exchange_s:.0f} s: {first_line(error)}"
    if wrong:
        raise NoAnswer(f"axis {axis}, {named(ranks)} on {hosts.of(ranks)}: {wrong}")
