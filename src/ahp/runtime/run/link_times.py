"""How long each rank's links to other hosts take: who of the ranks has a slow one does not show in a collective, where all wait alike.

Ranks with the same place on their hosts form a ring, and neighbours exchange one tensor, pair by pair, so that no link waits for
another. A rank whose network is slow is slow on both its links; at either neighbour the other link is as fast as ever. Of two hosts
there is one link for each pair, and both its ends are slow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

LINK_BYTES = 4 << 20
"""[Empirical] Long enough that the bandwidth counts and not the latency: 80 us on a link of 400 Gb/s, 34 ms on one of 1 Gb/s."""
ROUNDS = 4
"""The least of them counts, and the first not at all: a partner may come late to that."""


def rings(hosts: Sequence[str]) -> list[list[int]]:
    """Ranks that have the same place on their hosts, one of each host; ``hosts`` by rank."""
    seen: dict[str, int] = {}
    by_place: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        place = seen[host] = seen.get(host, -1) + 1
        by_place.setdefault(place, []).append(rank)
    return [ranks for ranks in by_place.values() if len(ranks) > 1]


def pairs(ring: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The links of a ring, in turns in which each rank has one at most."""
    size = len(ring)
    links = [(ring[i], ring[(i + 1) % size]) for i in range(size if size > 2 else 1)]
    last = [links.pop()] if size % 2 and size > 1 else []
    return [turn for turn in (links[::2], links[1::2], last) if turn]


def link_s(rank: int, hosts: Sequence[str], device: torch.device) -> float:
    """Seconds of the faster one of this rank's links, 0 where it has none. Collective."""
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
