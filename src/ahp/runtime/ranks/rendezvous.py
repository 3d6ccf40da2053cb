"""How the launchers of a run's nodes find each other, and how workers find a store: on one address only.

torch's own rendezvous classes listen on every address of the node, and one of them unpickles what anyone leaves there under a name that can
be guessed.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ahp.runtime.ranks.own_store import PORT, TIMEOUT_S, store_on

BACKEND = "ahp"
LOOPBACK = "127.0.0.1"


class OneAddress(RendezvousHandler):
    """A fixed number of nodes. Node 0 keeps a store on the endpoint's address; without an endpoint there is one node, and a new store on
    the loopback address each time its workers are started.

    Under torchrun: ``--rdzv-backend ahp --rdzv-endpoint HOST:PORT --rdzv-conf rank=NODE``.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id, self.nodes = parameters.run_id, parameters.max_nodes
        self.endpoint = parameters.endpoint.strip()
        self.rank = parameters.get_as_int("rank", 0) or 0
        self.timeout = timedelta(seconds=parameters.get_as_int("timeout", TIMEOUT_S) or TIMEOUT_S)
        self.closed = False
        self.store: dist.TCPStore | None = None
        self.host, self.port = LOOPBACK, 0
        if parameters.min_nodes != self.nodes:
            raise ValueError(f"--nnodes {parameters.min_nodes}:{self.nodes}: --rdzv-backend {BACKEND} takes one number")
        if self.nodes > 1 and not (self.endpoint and 0 <= self.rank < self.nodes and "rank" in parameters.config):
            raise ValueError(
                f"--nnodes {self.nodes}: --rdzv-backend {BACKEND} needs --rdzv-endpoint HOST:PORT, an address of node 0, and "
                f"--rdzv-conf rank=NODE, from 0 to {self.nodes - 1} (given: {self.endpoint!r}, {parameters.config.get('rank')!r})"
            )
        if self.endpoint:
            self.host, self.port = parse_rendezvous_endpoint(self.endpoint, default_port=PORT)

    def next_rendezvous(self) -> RendezvousInfo:
        if self.store is None or not self.endpoint:
            self.store = self._serve() if self.rank == 0 else self._connect()
        # With one node, the launcher's own notes never leave this process.
        notes = dist.HashStore() if self.nodes == 1 else dist.PrefixStore(f"launchers/{self.run_id}", self.store)
        return RendezvousInfo(notes, self.rank, self.nodes, RendezvousStoreInfo(self.host, self.port))

    def _serve(self) -> dist.TCPStore:
        store = store_on(self.host, self.port if self.endpoint else 0, option="--rdzv-endpoint", timeout=self.timeout)
        self.port = store.port
        return store

    def _connect(self) -> dist.TCPStore:
        return dist.TCPStore(self.host, self.port, is_master=False, timeout=self.timeout)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        self.closed = True

    def shutdown(self) -> bool:
        self.closed, self.store = True, None
        return True


def creator() -> RendezvousHandlerCreator:
    """The entry point in the group ``torchrun.handlers`` that torchrun calls for ``--rdzv-backend ahp``."""
    return OneAddress


def register() -> str:
    """Make the rendezvous known to torch's launcher in this process; returns its name."""
    rendezvous_handler_registry.register(BACKEND, OneAddress)
    return BACKEND
