"""Who does not come to a collective in the middle of a run: a time-out says only that this rank has waited.

Ranks that wait for the same one give up together. Each says so in the store of the job before it ends; whoever has said nothing is
the one that hangs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ahp.errors import AhpError
from ahp.runtime.ranks.mesh import AXES, Mesh
from ahp.runtime.ranks.preflight import Hosts, named
from ahp.runtime.torch_compat import default_store, time_limit

GIVE_UP_S = 5.0
"""Between the first rank that gives up and the last one. [Empirical] They begin to wait for a rank that hangs within a step of each
other, which takes seconds at most."""
TIME_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
"""What gloo ("Timed out waiting 600000ms for recv operation") and NCCL ("Watchdog caught collective operation timeout") say."""


class RankMissing(AhpError):
    """Ranks that the others waited for in vain."""


def explained(error: Exception, mesh: Mesh, hosts: Hosts, step: int) -> Exception:
    """NobodyCame with the ranks that hang, where the error is a collective's time-out; else the error itself.

    ``step``: the last one that was done.
    """
    if not any(isinstance(cause, RuntimeError) and TIME_OUT.search(str(cause)) for cause in _causes(error)):
        return error
    store, rank, limit = default_store(), dist.get_rank(), time_limit(mesh.device)
    keys = {other: f"ahp/gave-up/{other}" for other in hosts.ranks}
    store.set(keys[rank], "")
    try:
        store.wait(list(keys.values()), timedelta(seconds=GIVE_UP_S))
    except RuntimeError:
        silent = [other for other in hosts.ranks if not store.check([keys[other]])]
        axes = [axis for axis in AXES if set(silent) & set(dist.get_process_group_ranks(mesh.group(axis)))]
        who = f"{named(silent)} on {hosts.of(silent)} did not come to a collective on axis {', '.join(axes)}"
    else:
        who = "a collective did not end, though every rank on this one's axes came to one"
    first_line = str(error).strip().splitlines()[0]
    return RankMissing(
        f"after step {step}: {who} within run.collective_timeout_s = {limit.total_seconds():g}; rank {rank} on {hosts.of([rank])} "
        f"waited: {first_line}"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
