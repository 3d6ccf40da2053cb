"""How hosts that are probed together meet: through torchrun, through srun, or at an address that each is given."""

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
"""For which the host that keeps the store waits until the others have read it."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """This host among those that are probed together."""

    store: dist.Store
    endpoint: tuple[str, int]
    """Where other processes of this host reach the store."""
    number: int
    size: int
    kept: object = None
    """The store itself, where it is gone with this object."""

    @property
    def is_first(self) -> bool:
        """The one that writes the file."""
        return self.number == 0


def at_rendezvous(nodes: int, rendezvous: str) -> Place:
    """At an address of one of them. The first is the one that keeps the store there, the others are numbered as they come: a number
    means nothing else. Raises BadInput where nobody answers, or for a host too many."""
    found = store_place.find(store_place.parse(rendezvous))
    number = 0 if found.is_host else found.store.add(f"{PREFIX}/came", 1)
    if number >= nodes:
        raise bad_input(
            "--nodes", nodes, f"so many hosts have come to {found.address} already; give the number of all of them"
        )
    return Place(found.store, (found.address.host, found.address.port), number, nodes)


def under_srun(task: slurm.Task) -> Place | None:
    """Of several tasks on a node, the first stands for it; None in the others. The very first keeps the store."""
    if task.local > 0:
        return None
    kept = slurm.become_worker(task)
    store, _, _ = launchers_store()
    return Place(store, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), task.node, task.nodes, kept)


def under_launcher() -> Place | None:
    """As torchrun says it to its workers; None in those that are not the first of their host."""
    here, workers = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if here > 0:
        return None
    store, rank, size = launchers_store()
    number = int(os.environ.get("GROUP_RANK", rank // workers))
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", size // workers))
    return Place(store, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), number, hosts)


class Meeting:
    """What the hosts say to each other. Every method is called by all of them alike."""

    def __init__(self, place: Place, *, within_s: float = MEET_S) -> None:
        """Raises NoAnswer with those that do not come."""
        self.place = place
        meet(place.store, place.number, place.size, at="probe of several hosts", within_s=within_s, who="host")
        self.work = Preparation((place.store, place.number, place.size), what="was probed")

    def all_of(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """What the work of each host came to, by their numbers, however long it takes while all live; it is JSON."""
        key = f"{PREFIX}/{what}"

        def say() -> None:
            self.place.store.set(f"{key}/{self.place.number}", json.dumps(work()))

        self.work.done_by_all(say)
        keys = [f"{key}/{number}" for number in range(self.place.size)]
        return [json.loads(said) for said in self.place.store.multi_get(keys)]

    def decided_by_first(self, decide: Callable[[], Result], kind: Any = None) -> Result:
        return self.work.decided_by_first(decide, kind)

    def leave(self) -> None:
        """The last word: the store may go now."""
        store, key = self.place.store, f"{PREFIX}/left"
        left = store.add(key, 1)
        began_s = time.monotonic()
        while self.place.is_first and left < self.place.size and time.monotonic() - began_s < LEAVE_S:
            time.sleep(0.05)
            left = store.add(key, 0)


def own_name() -> str:
    """By which this host is known when it is probed, and to the workers that train there."""
    return socket.gethostname()
