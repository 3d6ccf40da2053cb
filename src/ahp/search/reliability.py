"""What failures and checkpoints leave of a day: the share of time in which a job makes progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt

from ahp.cluster.model import Cluster
from ahp.engines.registry import get
from ahp.plan import Parallelism
from ahp.search.problem import Problem
from ahp.shipped import shipped

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Default:
    """One figure with its provenance; the keys are explained at the top of reliability.yaml."""

    value: float
    unit: str
    meaning: str
    source: str


@cache
def defaults() -> Mapping[str, Default]:
    """All of reliability.yaml by name, read once."""
    return {name: Default(**entry) for name, entry in shipped("ahp.search", "reliability.yaml").items()}


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a job on some devices stops, and what a stop and a checkpoint cost.

    The share of time that trains is 1 - b/t - f (t/2 + r): b seconds blocked every t seconds, f failures a second, each
    of which loses half an interval and r seconds (Young, A first order approximation to the optimum checkpoint interval,
    1974). It is largest at t = sqrt(2 b / f). First order: it holds while failures are rare against t and r.
    """

    per_s: float
    checkpoint_blocks_s: float
    restart_s: float

    @property
    def best_interval_s(self) -> float:
        """Seconds between two checkpoints that lose the least."""
        return sqrt(2.0 * self.checkpoint_blocks_s / self.per_s)

    @property
    def goodput(self) -> float:
        """Share of the time that trains, with checkpoints at the best interval; 0 where failures leave none."""
        lost = sqrt(2.0 * self.checkpoint_blocks_s * self.per_s) + self.per_s * self.restart_s
        return max(0.0, 1.0 - lost)


def checkpoint_bytes(asked: Problem) -> int:
    """A checkpoint: weights and optimizer states, each once, as the engine keeps them."""
    traits = get(asked.engine.name).traits(asked.job, Parallelism(), asked.engine)
    return asked.graph.num_parameters * (traits.master_weight_bytes + traits.optimizer_state_bytes)


def write_bytes_per_s(cluster: Cluster) -> float | None:
    """What all nodes write at once, by the storage that was measured; None where one was not.

    Each node's own disk adds to the rate; storage behind a network is the same for all of them and does not.
    """
    rates = []
    for group in cluster.groups:
        rate, shared = group.host.storage_write_bytes_per_s, group.host.storage_kind == "network"
        if not rate:
            return None
        rates.append((rate * (1 if shared else group.nodes), shared))
    shared_rates = [rate for rate, shared in rates if shared]
    return min(shared_rates) if shared_rates else sum(rate for rate, _ in rates)
