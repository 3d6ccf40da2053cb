"""Links between hosts are timed one by one, so that the rank with the slow ones is known."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ahp.runtime.run import link_times
from ahp.runtime.run.link_times import pairs, rings
from ahp.runtime.run.slow_ranks import slow_links
from tests.runtime.workers import Pool

LATE_S = 0.15


def test_ranks_with_one_place_on_their_hosts_form_a_ring() -> None:
    assert rings(["a", "a", "b", "b", "c"]) == [[0, 2, 4], [1, 3]]
    assert rings(["a", "a"]) == []


@pytest.mark.parametrize("size", range(2, 8))
def test_every_link_has_its_turn_and_no_rank_two_at_once(size: int) -> None:
    turns = pairs(range(size))
    links = [frozenset(pair) for turn in turns for pair in turn]
    assert len(set(links)) == len(links) == (size if size > 2 else 1)
    assert len(turns) <= 3
    for turn in turns:
        ends = [rank for pair in turn for rank in pair]
        assert len(set(ends)) == len(ends)


def timed(rank: int, world: int, slow: int) -> float:
    """Runs in each worker, each as if on a host of its own; sends and receives of worker ``slow`` take long."""
    whole = dist.batch_isend_irecv

    def late(operations: list[Any]) -> Any:
        if rank == slow:
            time.sleep(LATE_S)
        return whole(operations)

    with mock.patch.object(dist, "batch_isend_irecv", late), mock.patch.object(link_times, "LINK_BYTES", 1 << 10):
        return link_times.link_s(rank, [f"host-{other}" for other in range(world)], torch.device("cpu"))


@pytest.mark.parametrize("world", [3, 4])
def test_the_rank_with_a_slow_link_is_found_and_its_neighbours_are_not(pool: Pool, world: int) -> None:
    links_s = pool.run(timed, world, 1)
    assert links_s[1] >= LATE_S
    found = slow_links(links_s)
    assert max(found, key=lambda rank: found[rank].ratio) == 1
    assert found[1].reason == "network"
    assert all(link_s < LATE_S for rank, link_s in enumerate(links_s) if rank != 1)
