"""Connections to a store are given up when nobody acknowledges any more."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch.distributed as dist

from ahp.runtime.ranks.dead_peer import give_up_after
from ahp.runtime.ranks.own_store import store_on


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has TCP_USER_TIMEOUT")
def test_connections_to_a_store_get_the_limit_and_others_do_not() -> None:
    kept = store_on("127.0.0.1", 0, option="--rendezvous")
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_connection(other.getsockname()) as alone:
        before = give_up_after(kept.port, 5.0)  # the store's own client
        client = dist.TCPStore("127.0.0.1", kept.port, is_master=False)
        assert give_up_after(kept.port, 5.0) == before + 1
        assert alone.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        open_before = len(os.listdir("/proc/self/fd"))
        give_up_after(kept.port, 5.0)
        assert len(os.listdir("/proc/self/fd")) == open_before
        client.set("key", "value")
        assert kept.get("key") == b"value"
