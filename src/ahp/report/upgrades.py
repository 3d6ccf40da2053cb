"""What 10 % more of each resource would bring to a plan that stays as it is: priced, not searched (``ahp explain`` searches)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ahp.cluster.better import MORE, better_clusters
from ahp.errors import AhpError
from ahp.job import MOST_SEQUENCES
from ahp.plan import Forecast, Plan
from ahp.words import compared, percent, seconds

if TYPE_CHECKING:
    from ahp.cluster.model import Cluster
    from ahp.graph.operators import ModelGraph

NOTHING = 0.0005
"""Less than the 0.1 % that words can show."""


@dataclass(frozen=True)
class Upgrade:
    """More of one resource, and what it brings the plan's layout."""

    change: str
    gain: float
    """Share by which each token takes less time; 0 if the layout cannot run."""
    words: str


def upgrades_of(graph: ModelGraph, cluster: Cluster, plan: Plan) -> list[Upgrade]:
    """Upgrades of each piece of hardware and of the batch, the most useful first. Raises AhpError if the plan cannot be priced."""
    from ahp.forecast.step import forecast

    today = forecast(graph, cluster, plan.job, plan.parallelism, plan.engine)
    found = []
    for change, better in better_clusters(cluster):
        try:
            there = forecast(graph, better, plan.job, plan.parallelism, plan.engine)
        except AhpError as refusal:
            found.append(Upgrade(change, 0.0, f"not possible: {refusal}"))
            continue
        gain = 1 - there.step_time_s / today.step_time_s
        found.append(Upgrade(change, gain, f"{_step(gain, there)}{_fit(today, there)}"))
    found.append(_larger_batch(graph, cluster, plan, today))
    return sorted(found, key=lambda one: -one.gain)


def sentence(upgrades: Sequence[Upgrade]) -> str:
    """Which resource binds, by what more of it would bring."""
    most = upgrades[0]
    if most.gain < NOTHING:
        return "With this layout no single resource would save time if there were 10 % more."
    return f"With this layout {most.change} would help most: {percent(most.gain)} less time for each token."


def _larger_batch(graph: ModelGraph, cluster: Cluster, plan: Plan, today: Forecast) -> Upgrade:
    """The batch 10 % larger, or the next larger one that the layout divides into whole micro-batches."""
    from ahp.forecast.step import forecast

    layout, batch = plan.parallelism, plan.job.global_batch_size
    at_once = layout.data_parallel_replicate_degree * layout.data_parallel_shard_degree * layout.micro_batch_size
    # If replicas differ or a schedule has an order of its own, their counts are made for this batch.
    counted = {"micro_batches_per_replica": None, "pipeline_parallel_order": None}
    larger = at_once * math.ceil(MORE * batch / at_once - 1e-9)
    change = f"global batch {larger:,}, {percent(larger / batch - 1)} more"
    if any(getattr(layout, key) is not None for key in counted):
        return Upgrade(change, 0.0, "not forecast: the layout's micro_batches_per_replica is for this batch only")
    if larger > MOST_SEQUENCES:
        return Upgrade(change, 0.0, f"not possible: more than {MOST_SEQUENCES:,} sequences a step")
    try:
        job = plan.job.model_copy(update={"global_batch_size": larger})
        there = forecast(graph, cluster, job, layout, plan.engine)
    except AhpError as refusal:
        return Upgrade(change, 0.0, f"not possible: {refusal}")
    gain = 1 - there.step_time_s * batch / (today.step_time_s * larger)
    tokens = f"{there.tokens_per_s_per_device:,.0f} tokens/s per device"
    return Upgrade(
        change, gain, f"{seconds(there.step_time_s)} a step, {tokens}, {_compared(gain, 'time for each token')}"
    )


def _step(gain: float, there: Forecast) -> str:
    return f"{seconds(there.step_time_s)} a step, {_compared(gain, 'time')}"


def _compared(gain: float, what: str) -> str:
    return f"{compared(gain, 'less', 'more', 'as much', NOTHING)} {what}"


def _fit(today: Forecast, there: Forecast) -> str:
    """What more memory changes if the layout stays: the probability that it fits."""
    before, after = today.fit_words, there.fit_words
    return "" if before == after else f"; fits with probability {after} instead of {before}"
