"""Which hosts measure their link when: in each round every host has at most one partner, so that no two pairs disturb each other."""

from __future__ import annotations

from collections.abc import Sequence

MOST_ROUNDS = 15
"""Enough for all pairs of up to 16 hosts. A round takes some seconds (``runtime/probe/link_worker.py``), so this keeps many hosts from measuring for an hour; each still
meets 15 others, which shows whether a cable or switch is slow, or only one pair."""

Pair = tuple[int, int]


def rounds(groups: Sequence[int], most: int = MOST_ROUNDS) -> list[list[Pair]]:
    """Pairs of hosts in rounds; ``groups`` has the group of each host.

    All pairs if that takes at most ``most`` rounds. Else ``most`` rounds: first those that every pair of groups needs to meet, then
    others spread evenly; there are more only if every pair of groups needs more to meet.
    """
    found = all_rounds(len(groups))
    if len(found) <= most:
        return found
    meet = [{_groups_of(pair, groups) for pair in pairs} for pairs in found]
    wanted = set().union(*meet)
    chosen: list[int] = []
    while wanted:
        best = max(range(len(found)), key=lambda at: len(wanted & meet[at]))
        chosen.append(best)
        wanted -= meet[best]
    rest = [at for at in range(len(found)) if at not in chosen]
    left = max(0, most - len(chosen))
    chosen += [rest[number * len(rest) // left] for number in range(left)]
    return [found[at] for at in sorted(chosen)]


def all_rounds(hosts: int) -> list[list[Pair]]:
    """Every pair once, in as few rounds as possible: one host stays in its place, the others go round it (the circle method
    of tournaments). If their number is odd, one rests in each round."""
    places: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    found = []
    for _ in range(len(places) - 1 if hosts > 1 else 0):
        half = len(places) // 2
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def _groups_of(pair: Pair, groups: Sequence[int]) -> frozenset[int]:
    return frozenset(groups[host] for host in pair)
