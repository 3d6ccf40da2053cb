"""A cluster's forecasts corrected by runs on it: what their steps took, over what the forecast says they take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from ahp.cluster.model import Calibration, Cluster
from ahp.errors import BadInput
from ahp.run_files import read_metrics
from ahp.runtime.run.folder import RunFolder

WARM_UP_STEPS = 3
"""First steps of a start, left out: they allocate, compile and load."""

LEAST_STEPS = 5
"""Steps that a median is taken of, at least."""


@dataclass(frozen=True)
class MeasuredRun:
    """The steps of one run under its last plan."""

    folder: str
    step_s: float
    """Median."""
    steps: int


def measured(folder: RunFolder) -> MeasuredRun:
    """The steps since the plan was last changed, without the first of them. Raises BadInput where there are too few."""
    records = read_metrics(folder.metrics_file, ["step_time_s"])
    if not records:
        raise BadInput(
            f"RUN = {str(folder.path)!r}: no step was measured there (valid: the folder of a run of ahp train)"
        )
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
    groups = tuple(group.model_copy(update={"calibration": None}) for group in cluster.groups)
    return cluster.model_copy(update={"groups": groups})


def calibrated(cluster: Cluster, ratios: Sequence[float], runs: Sequence[MeasuredRun]) -> Cluster:
    """The cluster with the geometric mean of the runs' ``ratios``, measured over forecast.

    Raises BadInput for a mixed cluster: a step does not say which of its groups took longer.
    """
    if cluster.is_mixed:
        names = [group.name for group in cluster.groups]
        raise BadInput(
            f"cluster.groups = {names}: the steps of a mixed cluster do not say which of its groups took longer (valid: one group)"
        )
    steps = sum(run.steps for run in runs)
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    source = f"{steps} steps of {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {date.today().isoformat()}"
    [group] = without_calibration(cluster).groups
    known = Calibration(step_ratio=mean, runs=len(runs), source=source)
    return cluster.model_copy(update={"groups": (group.model_copy(update={"calibration": known}),)})
