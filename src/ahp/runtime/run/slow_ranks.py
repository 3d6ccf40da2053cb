"""Finds ranks that are slower than their like: all other ranks wait for each of their steps.

As in NVIDIA's resiliency extension (straggler detection, docs of v0.4), a rank is compared with others, or with itself at its best if there
are none like it. Its like are the ranks with the same pipeline stage, the same share of the batch and the same group of devices: stages of
several lengths and mixed clusters are planned to differ.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from ahp.plan import Plan
from ahp.runtime.host_copy import HostCopy
from ahp.runtime.ranks.device_order import placement_of
from ahp.runtime.ranks.mesh import ranks_by_stage
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run.link_times import link_s
from ahp.runtime.run.own_time import STEPS, OwnTime, Stopwatch
from ahp.words import seconds

SLOW = 1.3
"""A rank is slow from this multiple of its like's time. NVIDIA's extension calls a rank a straggler below 0.75 of the reference, i.e. 1.33."""
OVER = 1.2
"""[Empirical] A slow rank stays slow down to this multiple, so that a rank at the threshold is not reported again and again."""
LEAST_EXCESS_S = 1e-3
"""[Empirical] A smaller excess is ignored: steps of a few milliseconds differ by as much from rank to rank."""

Reason = Literal["processor", "data", "network"]


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for, and why."""

    rank: int
    host: str
    ratio: float
    """Its own time (or its link's, for ``network``) divided by that of its like."""
    reason: Reason
    why: str
    since_step: int

    def plain(self) -> dict[str, Any]:
        """As data for status.json."""
        return {**asdict(self), "ratio": round(self.ratio, 2)}


@dataclass(frozen=True)
class Excess:
    """How much slower a rank is, and in what."""

    ratio: float
    reason: Reason
    why: str


def roles(plan: Plan) -> list[Hashable]:
    """The role of each rank: ranks with the same role should take equally long."""
    placement, batches = placement_of(plan), plan.parallelism.micro_batches(plan.job)
    found: list[Hashable] = [None] * plan.parallelism.world_size
    for stage, replicas in enumerate(ranks_by_stage(plan.parallelism)):
        for ranks, num_micro_batches in zip(replicas, batches, strict=True):
            for rank in ranks.flatten().tolist():
                group = placement.group_of(rank) if placement is not None else None
                found[rank] = stage, num_micro_batches, group
    return found


def as_shares(times: Sequence[OwnTime], alike: Sequence[Hashable]) -> list[OwnTime]:
    """Times of GPUs, whose computing is timed on a few products, scaled so that a role's median is a step without its wait for data."""
    step_s = min(time.step_s - time.waiting_for_data_s for time in times)
    usual = {role: median(t.computing_s for t, r in zip(times, alike, strict=True) if r == role) for role in alike}
    pairs = zip(times, alike, strict=True)
    return [t._replace(computing_s=step_s * t.computing_s / usual[r] if usual[r] else 0.0) for t, r in pairs]


def excess(time: OwnTime, like: OwnTime, threshold: float) -> Excess | None:
    """How much slower a rank is, and in which part of its time the most; None below the threshold."""
    over = [ours - theirs for ours, theirs in zip(time[:3], like[:3], strict=True)]
    ratio = sum(time[:3]) / sum(like[:3]) if sum(like[:3]) else 1.0
    if ratio < threshold or sum(over) < LEAST_EXCESS_S:
        return None
    part = over.index(max(over))
    verb = ("computes", "waits for a processor core", "waits for its data")[part]
    why = f"{verb} {seconds(time[part])} a step, its like {seconds(like[part])}"
    return Excess(ratio, "data" if part == 2 else "processor", why)


@dataclass
class Judge:
    """Compares the times of ranks, window by window."""

    alike: Sequence[Hashable]
    best: dict[int, OwnTime] = field(default_factory=dict)
    """Each rank's times in its fastest window so far, keyed by rank."""

    def after(self, times: Sequence[OwnTime], standing: Sequence[int] = ()) -> dict[int, Excess]:
        """The ranks that are slow now; ``standing``: the ranks that were slow in the window before."""
        found = {}
        pace = {rank: _own_s(time) / _own_s(self.best[rank]) for rank, time in enumerate(times) if rank in self.best}
        for rank, time in enumerate(times):
            like = self._like(rank, times, pace)
            slow = like and excess(time, like, OVER if rank in standing else SLOW)
            if slow:
                found[rank] = slow
        for rank, time in enumerate(times):
            if _own_s(time) and (rank not in self.best or _own_s(time) < _own_s(self.best[rank])):
                self.best[rank] = time
        return found

    def _like(self, rank: int, times: Sequence[OwnTime], pace: dict[int, float]) -> OwnTime | None:
        """The times of a rank's like; for a rank without like, its own best times, scaled by how much slower the others are now."""
        others = [time for other, time in enumerate(times) if other != rank and self.alike[other] == self.alike[rank]]
        if others:
            return OwnTime(*map(median, zip(*others, strict=True)))
        paces = [each for other, each in pace.items() if other != rank]
        if rank not in pace or not paces:
            return None
        usual = max(1.0, median(paces))
        return OwnTime(*(usual * part for part in self.best[rank]))


def slow_links(links_s: Sequence[float]) -> dict[int, Excess]:
    """Ranks whose faster link to another host is slow compared with the links of the other ranks."""
    found = {}
    for rank, link in enumerate(links_s):
        others = [other for at, other in enumerate(links_s) if at != rank and other]
        usual = median(others) if others else 0.0
        if usual and link >= SLOW * usual:
            why = f"its link to other hosts takes {seconds(link)} for 4 MiB, those of others {seconds(usual)}"
            found[rank] = Excess(link / usual, "network", why)
    return found


class SlowRanks:
    """Watches the ranks of a run. All ranks call its methods; every ``STEPS`` steps they exchange the numbers of ``OwnTime``."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self.plan, self.ranks = plan, ranks
        self.watch = Stopwatch(ranks.device) if ranks.size > 1 else None
        self.standing: dict[int, SlowRank] = {}
        self.judge: Judge | None = None
        self.hosts: list[str] = []
        self.least_step_s: float | None = None

    def step(self, data_wait_s: float) -> AbstractContextManager[None]:
        """The context that a step runs in."""
        return nullcontext() if self.watch is None else self.watch.step(data_wait_s)

    def exchanged(self) -> HostCopy | None:
        """The times of all ranks, on their way to the host, every ``STEPS`` steps; None otherwise. Collective."""
        own = self.watch.read() if self.watch is not None else None
        return None if own is None else self._gathered(own)

    def after(self, step: int, exchanged: HostCopy | None, say: Callable[[str], None]) -> bool:
        """Compare the ranks' times. Returns whether ranks are slow now or were before. Collective: the first call, and when links are timed."""
        if exchanged is None:
            return False
        if self.judge is None:
            self.judge, self.hosts = Judge(roles(self.plan)), self._hosts()
        times = [OwnTime(*row) for row in exchanged.read().tolist()]
        if self.ranks.device.type == "cuda":
            times = as_shares(times, self.judge.alike)
        found = self.judge.after(times, list(self.standing)) or self._on_links(times[0].step_s)
        return self._tell(step, found, say)

    @property
    def plain(self) -> list[dict[str, Any]]:
        """For status.json."""
        return [slow.plain() for _, slow in sorted(self.standing.items())]

    def _gathered(self, numbers: Sequence[float]) -> HostCopy:
        pinned = self.ranks.device.type == "cuda"
        given = torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned).to(self.ranks.device, non_blocking=True)
        together = [torch.empty_like(given) for _ in range(self.ranks.size)]
        dist.all_gather(together, given)
        return HostCopy(torch.stack(together))

    def _hosts(self) -> list[str]:
        found: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(found, socket.gethostname())
        return found

    def _on_links(self, step_s: float) -> dict[int, Excess]:
        """Ranks with slow links, timed only at first, when steps got slower though no rank did, and while a slow link stands."""
        first = self.least_step_s is None
        slower = self.least_step_s is not None and step_s >= SLOW * self.least_step_s
        self.least_step_s = min(step_s, self.least_step_s or step_s)
        if len(set(self.hosts)) == 1 or not (first or slower or self._stands("network")):
            return {}
        own = link_s(self.ranks.rank, self.hosts, self.ranks.device)
        return slow_links([row[0] for row in self._gathered([own]).read().tolist()])

    def _stands(self, reason: Reason) -> bool:
        return any(slow.reason == reason for slow in self.standing.values())

    def _tell(self, step: int, found: dict[int, Excess], say: Callable[[str], None]) -> bool:
        before = self.standing
        began = max(1, step - STEPS + 1)
        self.standing = {
            rank: SlowRank(
                rank,
                self.hosts[rank],
                one.ratio,
                one.reason,
                one.why,
                before[rank].since_step if rank in before else began,
            )
            for rank, one in found.items()
        }
        for rank in before.keys() - found.keys():
            say(f"step {step}: rank {rank} on {before[rank].host} is no longer slower than its like")
        for rank in sorted(found.keys() - before.keys()):
            slow = self.standing[rank]
            say(
                f"step {step}: rank {rank} on {slow.host} is slow ({slow.reason}): {slow.ratio:.2f} times its like for {STEPS} steps; it "
                f"{slow.why}"
                if slow.reason != "network"
                else f"step {step}: rank {rank} on {slow.host} is slow (network): {slow.why}"
            )
        return bool(before) or bool(found)


def _own_s(time: OwnTime) -> float:
    return sum(time[:3])
