"""How the launchers of a run's nodes find each other, and the workers a store: on one address alone.

torch's own rendezvous listens on every address of the node, and unpickles what anyone leaves there under a name that can be guessed.
"""

from __future__ import annotations

import socket

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "ahp"
LOOPBACK = "127.0.0.1"


class OneNode(RendezvousHandler):
    """Of a launcher without others: its workers meet at a store on the loopback address, a new one each time they are started."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id
        self.closed = False
        self.workers_store: dist.TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        self.workers_store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        # The launcher's own notes leave this process nowhere.
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

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
        self.closed, self.workers_store = True, None
        return True


def register() -> str:
    """Make the rendezvous known to torch's launcher; returns its name."""
    rendezvous_handler_registry.register(BACKEND, OneNode)
    return BACKEND
