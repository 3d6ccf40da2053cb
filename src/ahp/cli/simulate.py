"""What a plan's step costs: where the time and the memory go, and its timeline.

--trace writes the timeline for chrome://tracing or Perfetto, one track per pipeline rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ahp.errors import BadInput
from ahp.plan import Plan

if TYPE_CHECKING:
    from ahp.forecast.pricer import Priced


@dataclass(frozen=True)
class Arguments:
    plan: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PLAN")]
    """plan.yaml, or a run's folder."""
    trace: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the timeline to this file."""
    json: bool = False
    """Print one JSON object."""


def run(argv: list[str]) -> int:
    """``ahp simulate PLAN``. Returns the exit code; raises AhpError."""
    arguments = tyro.cli(Arguments, args=argv, prog="ahp simulate", description=__doc__)
    plan = Plan.load(arguments.plan)
    priced = price(plan)
    if arguments.trace is not None:
        _write_trace(priced, arguments.trace)
    following = [f"ahp explain {arguments.plan}", f"ahp train {arguments.plan}"]
    if arguments.json:
        result = {
            "parallelism": priced.parallelism.model_dump(mode="json"),
            "forecast": priced.forecast.model_dump(mode="json"),
            "wrote": arguments.trace,
            "next": following,
        }
        print(json.dumps(result))
    else:
        _show(plan, priced, arguments.trace, following)
    return 0


def price(plan: Plan) -> Priced:
    """Analyse the plan's model and price its layout on its cluster. Raises BadInput without a cluster."""
    from ahp.cluster.model import Cluster
    from ahp.forecast.step import price as price_layout
    from ahp.graph.trace import analyze

    if plan.cluster is None:
        raise BadInput("cluster = None: the plan names no cluster to simulate it on; write it with: ahp plan")
    graph = analyze(plan.model, plan.job, attention=plan.engine.attention)
    return price_layout(graph, Cluster.resolve(plan.cluster), plan.job, plan.parallelism, plan.engine)


def _write_trace(priced: Priced, path: str) -> None:
    from ahp.forecast import timeline

    try:
        timeline.write(priced, path)
    except OSError as error:
        raise BadInput(f"trace = {path!r}: cannot be written: {error.strerror}") from error


def _show(plan: Plan, priced: Priced, trace: str | None, following: list[str]) -> None:
    """Bars for people, on stdout."""
    from ahp.cluster.model import Cluster
    from ahp.report import tables
    from ahp.words import percent

    assert plan.cluster is not None
    console, forecast = tables.console(), priced.forecast
    cluster = Cluster.resolve(plan.cluster)
    console.print(
        f"{priced.parallelism.short()} on {cluster.num_devices} x {cluster.groups[0].device.name}", markup=False
    )
    console.print(
        f"{forecast.tokens_per_s_per_device:,.0f} tokens/s/device, MFU {percent(forecast.mfu)} of {forecast.mfu_peak}",
        markup=False,
    )
    console.print()
    console.print(tables.time_bar(forecast))
    console.print()
    console.print(tables.memory_bar(forecast, cluster.groups[0].device.memory_bytes))
    if trace is not None:
        console.print(f"\nWrote {Path(trace)}", markup=False)
    console.print(f"\nNext: {'    '.join(following)}", markup=False)
