"""Before the first step: the ranks of every mesh axis exchange one number, so that whoever does not answer is named.

Without it the first collective of the run would wait for a rank that never comes until its own time-out, and then say only
that a peer is silent.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from ahp.errors import AhpError
from ahp.runtime.mesh import AXES, Mesh
from ahp.runtime.torch_compat import default_store

ANSWER_S = 120.0
"""[Empirical] Ranks reach this point within a second of each other where all start well; on a busy machine of two cores
that starts eight of them, within 30 s."""

EXCHANGE_S = 60.0
"""Of one all-reduce of one number. The first on an axis also makes NCCL's communicator: seconds for a thousand ranks."""


class NoAnswer(AhpError):
    """Ranks that did not come, or a network that does not carry."""


def preflight(mesh: Mesh, *, answer_s: float = ANSWER_S, exchange_s: float = EXCHANGE_S) -> None:
    """Let all ranks meet, then all-reduce one number along each axis. Collective.

    Raises NoAnswer: ranks and hosts that did not come within ``answer_s``, or the axis on which an exchange failed or took
    longer than ``exchange_s``, with the ranks and hosts on it.
    """
    hosts = _meet(answer_s)
    for axis in AXES:
        if mesh.size(axis) > 1:
            _exchange(mesh, axis, hosts, exchange_s)


def _meet(answer_s: float) -> list[str]:
    """The host of every rank, by rank."""
    store, rank, world = default_store(), dist.get_rank(), dist.get_world_size()
    time = store.add(f"ahp/preflight/{rank}", 1)  # a process may ask more than once; all ranks count alike
    keys = [f"ahp/preflight/{time}/{other}" for other in range(world)]
    store.set(keys[rank], socket.gethostname())
    try:
        store.wait(keys, timedelta(seconds=answer_s))
    except RuntimeError:
        missing = [other for other in range(world) if not store.check([keys[other]])]
        there = sorted({store.get(key).decode() for key in keys if store.check([key])})
        raise NoAnswer(
            f"{_ranks(missing)} of {world} did not come to the first exchange within {answer_s:.0f} s; the others are on "
            f"{', '.join(there)}. Their logs say where they hang or why they ended"
        ) from None
    return [store.get(key).decode() for key in keys]


def _exchange(mesh: Mesh, axis: str, hosts: list[str], exchange_s: float) -> None:
    group = mesh.group(axis)
    ranks = dist.get_process_group_ranks(group)
    where = f"axis {axis}, {_ranks(ranks)} on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks))}"
    one = torch.ones((), device=mesh.device)
    try:
        work = dist.all_reduce(one, group=group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=exchange_s))
        total = one.item()
    except RuntimeError as error:
        first_line = str(error).strip().splitlines()[0]
        raise NoAnswer(
            f"{where}: an all-reduce of one number did not end within {exchange_s:.0f} s: {first_line}"
        ) from None
    if total != len(ranks):
        raise NoAnswer(f"{where}: an all-reduce of ones gave {total}, not {len(ranks)}")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
