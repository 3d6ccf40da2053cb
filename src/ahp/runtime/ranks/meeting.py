"""Ranks wait for each other at a store: this needs no process group, each can wait as long as it likes, and missing ranks are named."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ahp.errors import AhpError

MEET_S = 120.0
"""[Empirical] Ranks reach this point within a second of each other on a free machine. Eight ranks on two busy cores took up to 30 s."""

MOST_NAMED = 8


class NoAnswer(AhpError):
    """Ranks did not come, or the network does not work."""

    may_pass = True

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


def meet(store: dist.Store, rank: int, size: int, *, at: str, within_s: float = MEET_S, who: str = "rank") -> None:
    """Wait for all of ``size`` ranks. Collective. Raises NoAnswer with the ranks that did not come.

    ``at``: the purpose in words, the same on every rank; ``who``: the word for a rank. Ranks can meet several times, all equally often.
    """
    turn = store.add(f"ahp/{at}/turn-of/{rank}", 1)
    here = f"ahp/{at}/{turn}"
    store.set(f"{here}/{rank}", socket.gethostname())
    if store.add(f"{here}/came", 1) == size:
        store.set(f"{here}/all", "")
    try:
        store.wait([f"{here}/all"], timedelta(seconds=within_s))
    except RuntimeError:
        missing = absent(store, {other: f"{here}/{other}" for other in range(size)})
        if not missing:  # the last one has come by now
            return
        there = [other for other in range(size) if other not in set(missing)]
        where = dict.fromkeys(store.get(f"{here}/{other}").decode() for other in there[:MOST_NAMED])
        raise NoAnswer(
            f"{named(missing, who)} of {size} did not come to the {at} within {within_s:g} s; {named(there, who)} did, on "
            f"{', '.join(where)}. The logs of those that are missing say where they hang or why they ended",
            missing,
        ) from None


def absent(store: dist.Store, keys: dict[int, str]) -> list[int]:
    """The ranks whose keys are not set. Makes few queries if few ranks are missing: a job can have thousands."""
    if store.check(list(keys.values())):
        return []
    if len(keys) == 1:
        return list(keys)
    ranks = list(keys)
    halves = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    return [rank for half in halves for rank in absent(store, {other: keys[other] for other in half})]


def named(ranks: Sequence[int], who: str = "rank") -> str:
    """Ranks in words, the first eight by their numbers."""
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    if len(ranks) > MOST_NAMED:
        shown += f" and {len(ranks) - MOST_NAMED} more"
    return f"{who}{'s' if len(ranks) > 1 else ''} {shown}"
