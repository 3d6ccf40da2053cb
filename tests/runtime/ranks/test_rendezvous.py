"""The launchers of several nodes meet at a store on the one address that is given."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ahp.runtime.ranks.rendezvous import OneAddress
from tests.runtime.workers import free_port, listened_on


def parameters(endpoint: str = "", nodes: int = 1, least: int | None = None, **given: Any) -> RendezvousParameters:
    return RendezvousParameters("ahp", endpoint, "a-run", least or nodes, nodes, **given)


def test_two_nodes_meet_on_the_address_that_is_given_and_again() -> None:
    port, before = free_port(), listened_on()
    nodes = [OneAddress(parameters(f"127.0.0.2:{port}", 2, rank=str(rank))) for rank in (1, 0)]
    found: dict[int, Any] = {}
    for _ in range(2):  # workers that are started again
        threads = [
            threading.Thread(target=lambda n: found.__setitem__(n.rank, n.next_rendezvous()), args=(node,))
            for node in nodes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert listened_on() - before == {f"127.0.0.2:{port}"}
        infos = [found[rank] for rank in range(2)]
        assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
        places = [info.bootstrap_store_info for info in infos]
        assert [(place.master_addr, place.master_port) for place in places] == [("127.0.0.2", port)] * 2
        infos[0].store.set("said", "by node 0")
        assert infos[1].store.get("said") == b"by node 0"
    found.clear()
    infos.clear()
    for node in nodes:
        node.shutdown()
    assert listened_on() <= before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 2, "endpoint": "127.0.0.1:1"}, "needs --rdzv-endpoint HOST:PORT.*rank=NODE, from 0 to 1"),
        ({"nodes": 2, "rank": "0"}, "needs --rdzv-endpoint"),
        ({"nodes": 2, "endpoint": "127.0.0.1:1", "rank": "2"}, r"from 0 to 1 \(given: '127.0.0.1:1', '2'\)"),
        ({"nodes": 2, "least": 1, "endpoint": "127.0.0.1:1", "rank": "0"}, "--nnodes 1:2"),
    ],
)
def test_what_does_not_say_which_nodes_there_are_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OneAddress(parameters(**given))


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("0.0.0.0", "it stands for every address of the node"),
        ("localhost", "the name stands for .* on this node, which others do not reach"),
        ("192.0.2.1", "it must be an address of node 0"),  # of TEST-NET-1, which nobody has
    ],
)
def test_an_endpoint_that_would_be_open_or_is_not_here_is_refused(endpoint: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OneAddress(parameters(f"{endpoint}:{free_port()}", 2, rank="0")).next_rendezvous()


def test_a_host_may_be_given_without_a_port() -> None:
    assert OneAddress(parameters("127.0.0.1", 2, rank="1")).port == 29500
