"""How the launchers of a run's nodes find each other, and the workers a store: on one address alone.

torch's own rendezvous listens on every address of the node, and one of them unpickles what anyone leaves there under a name that can be
guessed.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
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

from ahp.errors import bad_input

BACKEND = "ahp"
LOOPBACK = "127.0.0.1"
PORT = 29500
TIMEOUT_S = 900
"""For which launchers wait for node 0, as torch's LaunchConfig has it."""


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
        # Of one node the launcher's own notes leave this process nowhere.
        notes = dist.HashStore() if self.nodes == 1 else dist.PrefixStore(f"launchers/{self.run_id}", self.store)
        return RendezvousInfo(notes, self.rank, self.nodes, RendezvousStoreInfo(self.host, self.port))

    def _serve(self) -> dist.TCPStore:
        listener = _bound(self.host, self.port if self.endpoint else 0)
        self.port = listener.getsockname()[1]
        return dist.TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, timeout=self.timeout,
            master_listen_fd=listener.detach(),
        )  # fmt: skip

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


def checked_address(option: str, host: str) -> tuple[int, str]:
    """Family and number of a host's address. Raises BadInput for one that nobody has, or that others cannot reach; ``option`` is how the user gave
    it."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise bad_input(option, host, f"no host of this name is known here ({error.strerror})") from error
    address = ipaddress.ip_address(str(place[0]))
    if address.is_unspecified:
        raise bad_input(option, host, "it stands for every address of the node; give that of the cluster's network")
    if address.is_loopback and not _is_address(host):
        rule = f"the name stands for {address} on this node, which others do not reach; give the address of the cluster's network"
        raise bad_input(option, host, rule)
    return family, str(place[0])


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens on the host's address, and on no other."""
    family, address = checked_address("--rdzv-endpoint", host)
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise ValueError(f"--rdzv-endpoint {host}:{port}: {error.strerror}; it must be an address of node 0") from error


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def creator() -> RendezvousHandlerCreator:
    """What torchrun asks for where ``--rdzv-backend ahp`` is given: an entry point in the group ``torchrun.handlers``."""
    return OneAddress


def register() -> str:
    """Make the rendezvous known to torch's launcher in this process; returns its name."""
    rendezvous_handler_registry.register(BACKEND, OneAddress)
    return BACKEND
