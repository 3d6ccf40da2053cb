"""How large a checkpoint is, and how fast a cluster writes it."""

from __future__ import annotations

from ahp.cluster.model import Cluster
from ahp.plan import Parallelism
from ahp.search.problem import Problem


def checkpoint_bytes(asked: Problem) -> int:
    """Bytes of a checkpoint: weights and optimizer states, each once, as the engine keeps them."""
    states = asked.traits(Parallelism()).states
    trained = states.trained_share
    frozen_bytes = states.compute_weight_bytes or states.master_weight_bytes
    each_bytes = trained * (states.master_weight_bytes + states.optimizer_bytes) + (1 - trained) * frozen_bytes
    return round(asked.graph.num_parameters * each_bytes)


def write_bytes_per_s(cluster: Cluster) -> float | None:
    """Bytes per second that all nodes write together, by measurements of storage; None if a group has none.

    Each node's own disk adds to the rate; storage behind a network is shared by all nodes and does not.
    """
    rates = []
    for group in cluster.groups:
        rate, shared = group.host.storage_write_bytes_per_s, group.host.storage_kind == "network"
        if not rate:
            return None
        rates.append((rate * (1 if shared else group.nodes), shared))
    shared_rates = [rate for rate, shared in rates if shared]
    return min(shared_rates) if shared_rates else sum(rate for rate, _ in rates)
