"""What a page shows beyond plan.yaml: the timeline, the memory of every rank, what binds; computed from the plan's model and cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ahp.errors import AhpError
from ahp.forecast.memory import PlaceMemory
from ahp.plan import Forecast, Plan
from ahp.report.binding import Binding
from ahp.report.schedules import ComparedSchedules
from ahp.report.upgrades import Upgrade


@dataclass(frozen=True)
class Facts:
    """Facts about one plan; empty, with the reason, if they cannot be computed."""

    missing: str = ""
    """Why there are no facts."""
    trace: Any = None
    """The timeline, in Chrome's trace event format."""
    places: Sequence[PlaceMemory] = ()
    binding: Binding | None = None
    upgrades: Sequence[Upgrade] = ()
    """What 10 % more of each resource would bring, the most useful first."""
    schedules: ComparedSchedules | None = None
    forecast: Forecast | None = None
    """Today's forecast of the plan's keys; the file's own can be of other keys, or from another version of AHP."""


def facts_of(plan: Plan) -> Facts:
    """Price the plan again. A model that is code is not run for a page; if something is gone or refused, ``missing`` has the reason."""
    from ahp.cluster.model import Cluster
    from ahp.forecast import timeline
    from ahp.forecast.step import pricer
    from ahp.graph.kept import analyze
    from ahp.graph.models import is_factory
    from ahp.report.binding import binding_of
    from ahp.report.schedules import compared_with_pattern
    from ahp.report.upgrades import upgrades_of

    if plan.cluster is None:
        return Facts("the plan names no cluster")
    if is_factory(plan.model):
        return Facts(f"its model is code ({plan.model}), which a page does not run")
    try:
        cluster = Cluster.resolve(plan.cluster)
        graph = analyze(plan.model, plan.job, attention=plan.engine.attention)
        prices = pricer(graph, cluster, plan.job, plan.engine.decided())
        priced = prices.price(plan.parallelism)
        known = plan.model_copy(
            update={"forecast": plan.forecast or priced.forecast, "parallelism": priced.parallelism}
        )
        return Facts(
            trace=timeline.chrome_trace(priced),
            places=prices.memory_of_places(priced),
            binding=binding_of(graph, cluster, known),
            upgrades=upgrades_of(graph, cluster, known),
            schedules=compared_with_pattern(prices, priced.parallelism),
            forecast=priced.forecast,
        )
    except AhpError as refusal:
        return Facts(str(refusal))
