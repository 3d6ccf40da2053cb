"""Finds the rank that does not come to a collective in the middle of a run: a time-out shows only that this rank has waited.

Ranks that wait for the same rank give up together. Each reports this in the store of the job before it ends; a rank that reports
nothing hangs.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from ahp.errors import AhpError, first_line
from ahp.runtime.ranks.meeting import NoAnswer, meet, named
from ahp.runtime.ranks.mesh import AXES, Mesh
from ahp.runtime.ranks.preflight import Hosts
from ahp.runtime.ranks.torch_compat import default_store, time_limit

GIVE_UP_S = 5.0
"""Time between the first rank that gives up and the last, on top of a step's time: a rank that waits for a waiting rank begins within a
step of it, and all wait equally long. [Empirical] Small steps on busy cores end within seconds of each other."""
TIME_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
"""Messages of gloo ("Timed out waiting 600000ms for recv operation") and NCCL ("Watchdog caught collective operation timeout")."""
GLOOS_OWN = re.compile(r"^\[[^]]*\.cc:\d+\] |\. This is typically caused by .*")
BROKEN = re.compile(r"connection (reset|closed)|broken pipe|remote process exited|socket closed", re.IGNORECASE)
"""Messages of gloo and NCCL if the process at the other end is gone."""
LOST_S = 1.0
"""Ranks that lose a connection notice it at once: a rank that has not come after this long is gone."""


class RankMissing(AhpError):
    """Ranks that the others waited for in vain; ``missing``: the ranks that are known to hang."""

    may_pass = True

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


def explained(
    error: Exception,
    mesh: Mesh,
    hosts: Hosts,
    step: int,
    *,
    give_up_s: float = GIVE_UP_S,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Exception:
    """RankMissing with the ranks that hang if the error is a collective's time-out, or naming those that are gone if a connection broke;
    else the error itself.

    A rank can wait for a rank that waits for a third, so all ranks of the job report that they gave up, not only this rank's neighbors.
    ``step``: the last completed step; ``waiting``: the context of the wait for the others, in which the launcher may end this rank.
    """
    words = [str(cause) for cause in _causes(error) if isinstance(cause, RuntimeError)]
    if any(BROKEN.search(said) for said in words):
        return _gone(error, hosts, step)
    if not any(TIME_OUT.search(said) for said in words):
        return error
    rank, limit, missing = dist.get_rank(), time_limit(mesh.device), list[int]()
    try:
        with waiting():
            meet(default_store(), rank, dist.get_world_size(), at="giving up", within_s=give_up_s)
    except NoAnswer as answer:
        missing = answer.missing
        who = f"{named(missing)} on {hosts.of(missing)} did not come to a collective on {_axes(mesh, missing)}"
    else:
        who = "a collective did not end, though every rank of the job came to one"
    return RankMissing(
        f"after step {step}: {who} within run.collective_timeout_s = {limit.total_seconds():g}; rank {rank} on {hosts.of([rank])} "
        f"waited: {_brief(error)}",
        missing,
    )


def _gone(error: Exception, hosts: Hosts, step: int) -> RankMissing:
    """RankMissing that names the ranks of the job that do not come to report a lost connection."""
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        meet(default_store(), rank, size, at="lost connection", within_s=LOST_S)
        who = "a connection between ranks broke, though all of them are there"
    except NoAnswer as answer:
        who = f"{named(answer.missing)} on {hosts.of(answer.missing)} went, or failed first: the logs there say why"
    except RuntimeError:
        who = "the ranks' store went, with the process that kept it"
    return RankMissing(
        f"after step {step}: {who}; rank {rank} on {socket.gethostname()} lost its connection: {_brief(error)}"
    )


def _brief(error: Exception) -> str:
    """The first line of an error, without what gloo says of itself: the place in its code, and what causes such errors in general."""
    return GLOOS_OWN.sub("", first_line(error))


def _axes(mesh: Mesh, ranks: list[int]) -> str:
    """The axes on which this rank waited for others in vain, or all axes if there are none; in words."""
    there_are = [axis for axis in (*AXES, "ep") if mesh.size(axis) > 1]
    own = [axis for axis in there_are if set(ranks) & set(dist.get_process_group_ranks(mesh.group(axis)))]
    found = own or there_are
    return f"ax{'i' if len(found) == 1 else 'e'}s {', '.join(found)}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
