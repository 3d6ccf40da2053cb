"""A store on one address of this node: torch's own listens on all addresses. Does not import torch's elastic launcher, which looks for AHP's
rendezvous when it is imported."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ahp.errors import bad_input

PORT = 29500
TIMEOUT_S = 900
"""How long launchers wait for node 0, as in torch's LaunchConfig."""


def checked_address(option: str, host: str) -> tuple[int, str]:
    """Family and number of a host's address. Raises BadInput for an unknown host, or an address that others cannot reach; ``option`` names the
    user's option."""
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


def store_on(host: str, port: int, *, option: str, timeout: timedelta = timedelta(seconds=TIMEOUT_S)) -> dist.TCPStore:
    """A store on the host's address, and on no other; port 0 takes a free port. ``option`` names the user's option for the host."""
    family, address = checked_address(option, host)
    try:
        listener = socket.create_server((address, port), family=family)
    except OSError as error:
        raise bad_input(option, f"{host}:{port}", f"{error.strerror}; it must be an address of node 0") from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False
