"""Where launchers of several nodes find their store: hosted, lost, taken over, joined again."""

from __future__ import annotations

import threading

import pytest

from ahp.errors import BadInput
from ahp.runtime.ranks import store_place
from ahp.runtime.ranks.store_place import Address, find, parse
from tests.runtime.workers import free_port


def addresses(count: int) -> tuple[Address, ...]:
    return parse(",".join(f"127.0.0.1:{free_port()}" for _ in range(count)))


def test_the_first_address_keeps_the_store_and_others_find_it() -> None:
    places = addresses(2)
    host = find(places)
    other = find(places)
    assert (host.is_host, other.is_host) == (True, False)
    assert host.address == other.address == places[0]
    host.store.set("key", "value")
    assert other.store.get("key") == b"value"


def test_the_next_address_takes_over_and_a_node_that_comes_back_joins_there() -> None:
    places = addresses(2)
    host = find(places, gone=[places[0]])
    assert (host.is_host, host.address) == (True, places[1])
    back = find(places)  # it has the first address itself, and lost nothing
    assert (back.is_host, back.address) == (False, places[1])


def test_a_node_whose_network_was_away_goes_back_to_the_store_that_it_lost() -> None:
    places = addresses(2)
    host = find(places)
    back = find(places, gone=[places[0]])
    assert (back.is_host, back.address) == (False, places[0])
    host.store.set("key", "value")
    assert back.store.get("key") == b"value"


def test_a_node_waits_for_the_addresses_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = addresses(2)
    monkeypatch.setattr(Address, "is_here", lambda self: self == second)
    late = find([first, second], find_s=0.5)
    assert (late.is_host, late.address) == (True, second)


def test_a_node_without_an_address_finds_one_that_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    (place,) = addresses(1)
    family, host = 2, place.host
    hosts = []
    here = threading.local()
    monkeypatch.setattr(Address, "is_here", lambda self: getattr(here, "is_host", False))

    def start() -> None:
        here.is_host = True
        hosts.append(find([place]))

    timer = threading.Timer(1.0, start)
    timer.start()
    assert not find([place], find_s=10.0).is_host
    timer.join()
    assert hosts[0].is_host
    assert store_place.is_here(family, host)


def test_where_nobody_answers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    places = addresses(2)
    monkeypatch.setattr(Address, "is_here", lambda self: False)
    with pytest.raises(
        BadInput, match=rf"--rendezvous {places[0]},{places[1]}: no launcher answers there within 0.4 s"
    ):
        find(places, find_s=0.2)


def test_the_only_address_is_tried_again_after_it_was_lost() -> None:
    (place,) = addresses(1)
    assert find([place], gone=[place]).is_host


@pytest.mark.parametrize("words", ["10.0.0.1:x", "0.0.0.0:29500", "127.0.0.1:1,no such host:2"])
def test_what_is_no_address_is_refused(words: str) -> None:
    with pytest.raises(BadInput, match="--rendezvous"):
        parse(words)
