"""Times each rank's links to other hosts: a collective, where all ranks wait equally, does not show which rank has a slow link.

Ranks with the same place on their hosts form a ring, and neighbors exchange one tensor, pair by pair, so that no link waits for
another. A rank whose network is slow is slow on both its links; the other link of each neighbor is as fast as ever. With two hosts
each pair has one link, and both its ends are slow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

LINK_BYTES = 4 << 20
"""[Empirical] Large enough that bandwidth counts and not latency: 80 us on a link of 400 Gb/s, 34 ms on a link of 1 Gb/s."""
ROUNDS = 4
"""Exchanges per link. The fastest counts; the first is ignored, because a partner can be late for it."""


def rings(hosts: Sequence[str]) -> list[list[int]]:
    """Groups of ranks with the same place on their hosts, one rank per host. ``hosts``: the host of each rank."""
    seen: dict[str, int] = {}
    by_place: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        place = seen[host] = seen.get(host, -1) + 1
        by_place.setdefault(place, []).append(rank)
    return [ranks for ranks in by_place.values() if len(ranks) > 1]


def pairs(ring: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The links of a ring, split into turns in which each rank has at most one link."""
    size = len(ring)
    links = [(ring[i], ring[(i + 1) % size]) for i in range(size if size > 2 else 1)]
    last = [links.pop()] if size % 2 and size > 1 else []
    return [turn for turn in (links[::2], links[1::2], last) if turn]


def link_s(rank: int, hosts: Sequence[str], device: torch.device) -> float:
    """Seconds of the faster of this rank's links, 0 if it has none. Collective."""
    turns: dict[int, int] = {}
    for ring in rings(hosts):
        for turn, links in enumerate(pairs(ring)):
            for pair in links:
                if rank in pair:
                    turns[turn] = pair[1 - pair.index(rank)]
    return min((_exchange_s(turns[turn], device) for turn in sorted(turns)), default=0.0)


def _exchange_s(partner: int, device: torch.device) -> float:
    given = torch.ones(LINK_BYTES, dtype=torch.uint8, device=device)
    taken = torch.empty_like(given)
    found = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        both = [dist.P2POp(dist.isend, given, partner), dist.P2POp(dist.irecv, taken, partner)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began_s)
    return min(found[1:])
