"""Gives up connections to a store when the network to it is gone.

torch's store waits without a limit for some answers (``check``, ``compare_set``, and after a wait that has timed out). A process that dies
closes its connections; a cut network sends nothing, and Linux retries for a quarter of an hour (tcp(7), ``tcp_retries2``).
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress


def give_up_after(port: int, seconds: float) -> int:
    """Make this process's connections to a peer's port end once sent data stays unacknowledged for that long. Returns how many there are.

    Only Linux has the option (``TCP_USER_TIMEOUT``), and lists a process's connections. torch does not expose those of its stores.
    """
    option, found = getattr(socket, "TCP_USER_TIMEOUT", None), 0
    if option is None or not os.path.isdir("/proc/self/fd"):
        return 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # already closed, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found += _set(int(name), port, option, int(1000 * seconds))
    return found


def _set(number: int, port: int, option: int, milliseconds: int) -> int:
    connection = socket.socket(fileno=number)
    try:
        peer = connection.getpeername()
        if connection.type != socket.SOCK_STREAM or not isinstance(peer, tuple) or peer[1] != port:
            return 0
        connection.setsockopt(socket.IPPROTO_TCP, option, milliseconds)
        return 1
    finally:
        connection.detach()  # the socket stays torch's
