"""How hosts that are probed together meet: through torchrun, through srun, or at an address that is given to each."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ahp.errors import bad_input
from ahp.runtime.ranks import slurm, store_place
from ahp.runtime.ranks.meeting import MEET_S, meet
from ahp.runtime.ranks.preparation import Preparation
from ahp.runtime.ranks.torch_compat import launchers_store

PREFIX = "ahp/probe"
LEAVE_S = 10.0
"""How long the host that keeps the store waits for the others to read it."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """This host among those that are probed together."""

    store: dist.Store
    endpoint: tuple[str, int]
    """Host and port at which other processes of this host reach the store."""
    number: int
    size: int
    kept: object = None
    """Keeps the store alive, if this process serves it."""

    @property
    def is_first(self) -> bool:
        """Whether this host writes the file."""
        return self.number == 0


def at_rendezvous(nodes: int, rendezvous: str) -> Place:
    """The place of a host that meets the others at an address of one of them. The host that keeps the store there is the first; the others
    are numbered as they come: a number means nothing else. Raises BadInput if nobody answers, or if too many hosts come."""
    found = store_place.find(store_place.parse(rendezvous))
    number = 0 if found.is_host else found.store.add(f"{PREFIX}/came", 1)
    if number >= nodes:
        raise bad_input(
            "--nodes", nodes, f"so many hosts have come to {found.address} already; give the number of all of them"
        )
    return Place(found.store, (found.address.host, found.address.port), number, nodes)


def under_srun(task: slurm.Task) -> Place | None:
    """The place of a node under srun, in the first of its tasks; None in the others. The very first task keeps the store."""
    if task.local > 0:
        return None
    kept = slurm.become_worker(task)
    store, _, _ = launchers_store()
    return Place(store, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), task.node, task.nodes, kept)


def under_launcher() -> Place | None:
    """The place of a host under torchrun, from its variables; None in workers that are not the first of their host."""
    here, workers = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if here > 0:
        return None
    store, rank, size = launchers_store()
    number = int(os.environ.get("GROUP_RANK", rank // workers))
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", size // workers))
    return Place(store, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), number, hosts)


class Meeting:
    """Exchanges data between the hosts. All hosts call every method."""

    def __init__(self, place: Place, *, within_s: float = MEET_S) -> None:
        """Raises NoAnswer with the hosts that do not come."""
        self.place = place
        meet(place.store, place.number, place.size, at="probe of several hosts", within_s=within_s, who="host")
        self.work = Preparation((place.store, place.number, place.size), what="was probed")

    def all_of(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """The result of each host's work as JSON data, in the order of their numbers; waits for as long as all hosts live."""
        key = f"{PREFIX}/{what}"

        def say() -> None:
            self.place.store.set(f"{key}/{self.place.number}", json.dumps(work()))

        self.work.done_by_all(say)
        keys = [f"{key}/{number}" for number in range(self.place.size)]
        return [json.loads(said) for said in self.place.store.multi_get(keys)]

    def decided_by_first(self, decide: Callable[[], Result], kind: Any = None) -> Result:
        return self.work.decided_by_first(decide, kind)

    def leave(self) -> None:
        """End the meeting. The first host waits for the others to leave, up to ``LEAVE_S``: the store may go then."""
        store, key = self.place.store, f"{PREFIX}/left"
        left = store.add(key, 1)
        began_s = time.monotonic()
        while self.place.is_first and left < self.place.size and time.monotonic() - began_s < LEAVE_S:
            time.sleep(0.05)
            left = store.add(key, 0)


def own_name() -> str:
    """The name of this host, for the probe and for the workers that train there."""
    return socket.gethostname()
