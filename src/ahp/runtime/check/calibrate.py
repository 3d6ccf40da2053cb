"""Corrects a cluster's forecasts by runs on it: the measured time of their steps, divided by the forecast."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

from ahp.cluster.model import Calibration, Cluster
from ahp.cluster.scaled import scaled
from ahp.cluster.sources import CORRECTED
from ahp.errors import BadInput
from ahp.run_files import read_metrics
from ahp.runtime.run.folder import RunFolder
from ahp.words import number_of

WARM_UP_STEPS = 3
"""First steps of a start, left out: they allocate, compile and load."""

LEAST_STEPS = 5
"""The least number of steps for a median."""


@dataclass(frozen=True)
class MeasuredRun:
    """The steps of one run under its last plan."""

    folder: str
    step_s: float
    """Median step time."""
    steps: int


def measured(folder: RunFolder) -> MeasuredRun:
    """The steps since the plan was last changed, without the first ``WARM_UP_STEPS``. Raises BadInput if there are too few."""
    records = read_metrics(folder.metrics_file, ["step_time_s"])
    if not records:
        why = "no step was measured there" if folder.path.is_dir() else "no such folder"
        raise BadInput(f"RUN = {str(folder.path)!r}: {why} (valid: the folder of a run of ahp train)")
    planned = records[-1].get("predicted_step_time_s")
    same: list[float] = []
    for record in reversed(records):
        if record.get("predicted_step_time_s") != planned:
            break
        same.append(record["step_time_s"])
    seconds = same[::-1][WARM_UP_STEPS:]
    if len(seconds) < LEAST_STEPS:
        raise BadInput(
            f"RUN = {str(folder.path)!r}: {len(same)} steps were measured under its plan (valid: {WARM_UP_STEPS + LEAST_STEPS} "
            f"or more; the first {WARM_UP_STEPS} are left out)"
        )
    return MeasuredRun(str(folder.path), statistics.median(seconds), len(seconds))


def without_calibration(cluster: Cluster) -> Cluster:
    """The cluster as if nothing had run on it."""
    return cluster.with_groups(group.model_copy(update={"calibration": None}) for group in cluster.groups)


def calibrated(cluster: Cluster, ratios: Sequence[float], runs: Sequence[MeasuredRun]) -> Cluster:
    """The cluster of one group, calibrated with the geometric mean of the runs' ``ratios``, measured over forecast."""
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    [group] = without_calibration(cluster).groups
    known = Calibration(step_ratio=mean, runs=len(runs), source=_source(runs))
    return cluster.with_groups([group.model_copy(update={"calibration": known})])


def _source(runs: Sequence[MeasuredRun]) -> str:
    steps = sum(run.steps for run in runs)
    return f"{number_of(steps, 'step')} of {number_of(len(runs), 'run')}, {date.today().isoformat()}"


STEP_SPREAD, GROUP_SPREAD = 0.05, 0.5
"""Spreads of the logarithms in the fit; assumed, not measured: two times in three, steps are within a twentieth of a forecast that is right
about each group, and groups are within half of their probed speed. Other weights change only what the steps leave open."""
LEAST_TOLD = 0.5
"""Runs whose steps leave more than this part of ``GROUP_SPREAD`` open do not determine a group's ratio."""


def group_ratios(
    cluster: Cluster, runs: Sequence[MeasuredRun], forecasts_s: Callable[[Cluster], Sequence[float]]
) -> dict[str, float]:
    """How many times as long as forecast each group of a mixed cluster computes, fitted to the steps of all runs together.

    ``forecasts_s``: the forecasts of the runs' layouts on a cluster. The ratios explain the steps best, and keep a group as it was
    probed where the steps leave it open (least squares of logarithms, a Gaussian prior).

    Raises BadInput if the runs do not tell the groups apart: fewer runs than groups, or a group that no run waits for.
    """
    import numpy as np
    from scipy.optimize import least_squares

    names = [group.name for group in cluster.groups]
    measured = np.log([run.step_s for run in runs])

    def misses(logs: np.ndarray) -> np.ndarray:
        forecasts = forecasts_s(with_ratios(cluster, dict(zip(names, np.exp(logs), strict=True)), ""))
        return np.concatenate([(np.log(forecasts) - measured) / STEP_SPREAD, logs / GROUP_SPREAD])

    # A difference of a hundredth: a schedule's length is piecewise linear in the times of its parts.
    found = least_squares(misses, np.zeros(len(names)), diff_step=0.01, bounds=(-4.0, 4.0))
    spread = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    open_ = [name for name, left in zip(names, spread, strict=True) if left > LEAST_TOLD * GROUP_SPREAD]
    if open_:
        raise BadInput(
            f"cluster.groups = {names}: the steps of {len(runs)} {'run' if len(runs) == 1 else 'runs'} do not say which of its groups took longer, not of "
            f"{' and '.join(open_)} (valid: runs under layouts of which each group holds up another, such as pipelines that are cut in different places)"
        )
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


def with_ratios(cluster: Cluster, ratios: dict[str, float], source: str) -> Cluster:
    """The cluster with the compute time of each group multiplied by its ratio."""
    return cluster.with_groups(scaled(group, ratios[group.name], source) for group in cluster.groups)


def calibrated_groups(cluster: Cluster, ratios: dict[str, float], runs: Sequence[MeasuredRun]) -> Cluster:
    """The mixed cluster with its groups' figures corrected by runs: no single ratio corrects a forecast there."""
    by = _source(runs)
    corrected = cluster.with_groups(
        scaled(group, ratios[group.name], f"times {ratios[group.name]:.3g} by {by}") for group in cluster.groups
    )
    return corrected.model_copy(update={"source": f"{cluster.source}, {CORRECTED} {by}"})
