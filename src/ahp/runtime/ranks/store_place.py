"""Where the store of nodes that come and go lies: at the first of some addresses whose node is there.

The store is one process's memory, so it dies with its node. Launchers that lose it look for the next address; a launcher that starts, or starts again,
takes a store that answers before it makes one.
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
"""For which a node looks for the store, or waits for an address that comes before its own: that host may start last."""
ANSWER_S = 2.0
"""Within which a host of the same network answers a connection."""
CALL_S = 5.0
"""Within which a store answers what needs no other node; then it is gone, or the network to it. As long as a launcher may be silent."""
POLL_S = 0.5


@dataclass(frozen=True)
class Address:
    """Of a node that can keep the store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def is_here(self) -> bool:
        """Whether it is one of this node's."""
        return is_here(*checked_address("--rendezvous", self.host))

    def answers(self) -> bool:
        """Whether something listens there."""
        with suppress(OSError), socket.create_connection((self.host, self.port), timeout=ANSWER_S):
            return True
        return False

    def refuses(self) -> bool:
        """Whether the host is there and nothing listens at the port: the process has ended, and others of its host may go on."""
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
    """``HOST[:PORT],HOST[:PORT]``, in the order in which they are tried. Raises BadInput for what is no address of a node."""
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
    """The store at one of the addresses, made here where an address is this node's and none answers; ``gone``: where it was lost.

    Raises BadInput where there is none.
    """
    left = [address for address in addresses if address not in gone] or list(addresses)
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        if (found := _found(left, addresses, late=waited_s > find_s)) is not None:
            found.store.set_timeout(timedelta(seconds=CALL_S))
            give_up_after(found.address.port, CALL_S)
            return found
        if waited_s > 2 * find_s:  # a node that gave up waiting for another one has its store by now
            raise BadInput(
                f"--rendezvous {','.join(map(str, left))}: no launcher answers there within {2 * find_s:g} s; one of the nodes must have this "
                "address, run this command too, and let the others reach the port"
            )
        time.sleep(POLL_S)


def _found(left: Sequence[Address], addresses: Sequence[Address], *, late: bool) -> FoundStore | None:
    """``left``: where a store may be made. ``late``: the nodes of the addresses before this one's own do not come any more."""
    for index, address in enumerate(left):
        if address.is_here() and (index == 0 or late):
            # The job may have gone on at another address meanwhile, and a network that was away may be back: one store is made, not two.
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
    """A store that listens on this address alone; None where another launcher of this node keeps one there."""
    with suppress(BadInput):
        return store_on(address.host, address.port, option="--rendezvous", timeout=timedelta(seconds=FIND_S))
    return None
