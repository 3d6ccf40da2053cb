"""Correct a cluster's numbers by runs on it: the measured time of their steps, divided by the forecast.

Writes the cluster with the ratio; every forecast and search on it takes that into account, with a narrower band. For a mixed cluster, runs
under different layouts show together how long each of its groups takes; the figures of the groups are corrected.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.cli.writable import require_writable
from ahp.errors import BadInput, bad_input
from ahp.optional import Flag
from ahp.plan import Forecast, Plan

if TYPE_CHECKING:
    from ahp.cluster.model import Cluster
    from ahp.runtime.check.calibrate import MeasuredRun


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")
    ]
    """Folders of runs of ahp train on the same cluster."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("cluster.calibrated.yaml")
    """File to write."""
    json: Flag = False
    """Print one JSON object."""


@dataclass(frozen=True)
class PricedRun:
    """One run with its forecasts: before any calibration, and after calibration by all runs."""

    run: MeasuredRun
    plan: Plan
    before: Forecast
    after: Forecast

    @property
    def ratio(self) -> float:
        return self.run.step_s / self.before.step_time_s


def run(argv: list[str]) -> int:
    """``ahp calibrate RUN ...``. Returns the exit code; raises AhpError."""
    arguments = options_of(Arguments, argv, "ahp calibrate", __doc__)
    if not arguments.runs:
        raise BadInput("RUN = (none): give the folder of at least one run of ahp train")
    if twice := _twice(arguments.runs):
        raise bad_input("RUN", twice, "given a second time, so that it would count twice")
    require_writable(arguments.output)
    cluster, found, ratios = _held(arguments.runs)
    cluster.save(arguments.output)
    following = f"ahp plan {_model(found[0].plan)} {shlex.quote(str(arguments.output))}"
    if arguments.json:
        result = {
            "runs": [
                {
                    **asdict(one.run), "parallelism": one.plan.parallelism.model_dump(mode="json"),
                    "forecast_s": one.before.step_time_s, "band_s": _band_s(one.before), "ratio": one.ratio,
                    "calibrated_s": one.after.step_time_s, "calibrated_band_s": _band_s(one.after),
                }
                for one in found
            ],
            "calibration": ratios or _calibration(cluster), "wrote": str(arguments.output), "next": [following],
        }  # fmt: skip
        print_alone(json.dumps(result))
    else:
        print("\n".join(_lines(cluster, found, ratios)))
        print(f"\nWrote {arguments.output}\nNext: {following}")
    return 0


def _twice(folders: tuple[str, ...]) -> str | None:
    """The first folder that was given before, by whatever path."""
    places = [os.path.realpath(folder) for folder in folders]
    return next((folder for at, folder in enumerate(folders) if places[at] in places[:at]), None)


def _held(folders: tuple[str, ...]) -> tuple[Cluster, list[PricedRun], dict[str, float]]:
    """The cluster calibrated by some runs, each run with its forecasts, and the ratio of each group if there are several."""
    from ahp.runtime.check.calibrate import calibrated, calibrated_groups, group_ratios, measured, without_calibration
    from ahp.runtime.run.folder import RunFolder

    runs, plans, before, cluster = [], [], [], None
    for name in folders:
        folder = RunFolder(name)
        runs.append(measured(folder))
        plan = Plan.load(folder.plan_file)
        own = without_calibration(_cluster(plan, name))
        if cluster is not None and own != cluster:
            raise BadInput(
                f"RUN = {name!r}: it ran on another cluster than {folders[0]!r} (valid: runs on the same one)"
            )
        cluster = own
        plans.append(plan)
        print(f"pricing {name} ...", file=sys.stderr)
        before.append(_forecast(plan, own))
        _require_comparable(name, runs[-1].step_s / before[-1].step_time_s)
    assert cluster is not None, "there is a run"
    ratios: dict[str, float] = {}
    if cluster.is_mixed:
        ratios = group_ratios(cluster, runs, lambda on: [_forecast(plan, on).step_time_s for plan in plans])
        cluster = calibrated_groups(cluster, ratios, runs)
    else:
        cluster = calibrated(cluster, [r.step_s / f.step_time_s for r, f in zip(runs, before, strict=True)], runs)
    after = [_forecast(plan, cluster) for plan in plans]
    return cluster, [PricedRun(*parts) for parts in zip(runs, plans, before, after, strict=True)], ratios


def _require_comparable(name: str, ratio: float) -> None:
    """Raise BadInput for a run whose steps have nothing to do with its forecast."""
    from ahp.cluster.model import LEAST_RATIO, MOST_RATIO

    if not LEAST_RATIO < ratio < MOST_RATIO:
        raise BadInput(
            f"RUN = {name!r}: its steps took {ratio:.3g} times their forecast, so that the plan.yaml there is hardly that of the run "
            f"(valid: {LEAST_RATIO:g} to {MOST_RATIO:g} times)"
        )


def _forecast(plan: Plan, cluster: Cluster) -> Forecast:
    from ahp.forecast.step import simulate

    return simulate(model=plan.model, cluster=cluster, job=plan.job, parallelism=plan.parallelism, engine=plan.engine)


def _cluster(plan: Plan, name: str) -> Cluster:
    from ahp.cluster.model import Cluster

    if plan.cluster is None:
        raise BadInput(f"RUN = {name!r}: its plan names no cluster (valid: the folder of a run of ahp train)")
    return Cluster.resolve(plan.cluster)


def _calibration(cluster: Cluster) -> dict[str, object]:
    [group] = cluster.groups
    assert group.calibration is not None, "it was just put there"
    return group.calibration.model_dump(mode="json")


def _lines(cluster: Cluster, found: list[PricedRun], ratios: dict[str, float]) -> list[str]:
    from ahp.words import number_of, seconds

    lines = []
    for one in found:
        lines += [
            f"{one.run.folder}: {one.plan.parallelism.short()}, {number_of(one.run.steps, 'step')}",
            f"  measured   {seconds(one.run.step_s)} a step (median)",
            f"  forecast   {_told(one.before)}; measured is {one.ratio:.3g} times as long",
            f"  calibrated {_told(one.after)}",
        ]
    if ratios:
        factors = ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items())
        return [*lines, f"From here on each group counts as slower by a factor: {factors}."]
    known = _calibration(cluster)
    lines.append(
        f"Forecasts on this cluster are multiplied by {known['step_ratio']:.3g} from here on ({known['source']})."
    )
    return lines


def _band_s(forecast: Forecast) -> tuple[float, float]:
    return forecast.step_time_low_s, forecast.step_time_high_s


def _told(forecast: Forecast) -> str:
    from ahp.words import seconds

    low, high = _band_s(forecast)
    return f"{seconds(forecast.step_time_s)} ({seconds(low)} .. {seconds(high)})"


def _model(plan: Plan) -> str:
    return shlex.quote(plan.model) if isinstance(plan.model, str) else "MODEL"
