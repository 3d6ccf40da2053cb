"""Finds the store of nodes that come and go: it lies at the first of several addresses whose node is there.

The store is one process's memory, so it dies with its node. Launchers that lose it look for the next address; a launcher that starts, or
starts again, takes a store that answers before it makes one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ahp.errors import BadInput, bad_input
from ahp.runtime.ranks.dead_peer import give_up_after
from ahp.runtime.ranks.own_store import PORT, checked_address, store_on

FIND_S = 60.0
"""How long a node looks for the store, or waits for an address that comes before its own: that host may start last."""
ANSWER_S = 2.0
"""Time within which a host of the same network answers a connection."""
CALL_S = 5.0
"""Time for a store to answer what needs no other node; then it, or the network to it, is gone. A launcher may be silent for as long."""
POLL_S = 0.5


@dataclass(frozen=True)
class Address:
    """The address of a node that can keep the store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def is_here(self) -> bool:
        """Whether this is one of this node's addresses."""
        return is_here(*checked_address("--rendezvous", self.host))

    def answers(self) -> bool:
        """Whether something listens there."""
        with suppress(OSError), socket.create_connection((self.host, self.port), timeout=ANSWER_S):
            return True
        return False

    def refuses(self) -> bool:
        """Whether the host is there and nothing listens at the port: the process has ended, and other processes of its host may go on."""
        with suppress(OSError):
            try:
                socket.create_connection((self.host, self.port), timeout=ANSWER_S).close()
            except ConnectionRefusedError:
                return True
        return False


def is_here(family: int, address: str) -> bool:
    """Whether an address is one of this node's."""
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind((address, 0))
        return True
    return False


def parse(endpoints: str) -> tuple[Address, ...]:
    """The addresses in ``HOST[:PORT],HOST[:PORT]``, in the order in which they are tried. Raises BadInput for what is not a node's address."""
    found = []
    for endpoint in endpoints.split(","):
        try:
            address = Address(*parse_rendezvous_endpoint(endpoint.strip(), default_port=PORT))
        except ValueError as error:
            raise bad_input("--rendezvous", endpoint, str(error)) from error
        checked_address("--rendezvous", address.host)
        found.append(address)
    return tuple(found)


@dataclass(frozen=True)
class FoundStore:
    """A store, and whether this process keeps it."""

    store: dist.TCPStore
    address: Address
    is_host: bool


def find(addresses: Sequence[Address], gone: Sequence[Address] = (), find_s: float = FIND_S) -> FoundStore:
    """The store at one of the addresses, made here if an address is this node's and none answers; ``gone``: addresses where it was lost.

    Raises BadInput if there is no store.
    """
    left = [address for address in addresses if address not in gone] or list(addresses)
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        if (found := _found(left, addresses, late=waited_s > find_s)) is not None:
            found.store.set_timeout(timedelta(seconds=CALL_S))
            give_up_after(found.address.port, CALL_S)
            return found
        if waited_s > 2 * find_s:  # a node that gave up waiting for another has made its store by now
            raise BadInput(
                f"--rendezvous {','.join(map(str, left))}: no launcher answers there within {2 * find_s:g} s; one of the nodes must have this "
                "address, run this command too, and let the others reach the port"
            )
        time.sleep(POLL_S)


def _found(left: Sequence[Address], addresses: Sequence[Address], *, late: bool) -> FoundStore | None:
    """``left``: addresses where a store may be made. ``late``: nodes whose addresses come before this node's are no longer waited for."""
    for index, address in enumerate(left):
        if address.is_here() and (index == 0 or late):
            # The job may have gone on at another address, and a lost network may be back: make one store, not two.
            other = next((one for one in addresses if one != address and one.answers()), None)
            made = None if other is not None else _made(address)
            if made is not None:
                return FoundStore(made, address, is_host=True)
            address = other or address
        if address.answers():
            store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=FIND_S))
            return FoundStore(store, address, is_host=False)
    return None


def _made(address: Address) -> dist.TCPStore | None:
    """A store that listens on this address only; None if another launcher of this node keeps one there."""
    with suppress(BadInput):
        return store_on(address.host, address.port, option="--rendezvous", timeout=timedelta(seconds=FIND_S))
    return None
