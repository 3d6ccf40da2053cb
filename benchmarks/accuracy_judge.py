"""The forecast of measured runs: priced one by one, and the constants of engines/steps.yaml fitted again to them."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from accuracy_rows import Run
from scipy.optimize import minimize_scalar

from ahp.engines import releases, steps
from ahp.forecast import step

Simulate = Callable[..., Any]

ROWS_OF_A_SOURCE = 90
"""A fit takes at most so many rows of one source, evenly spaced: every eighth of 720."""

GRID_POINTS = 9
"""Values of a constant that are priced, evenly spaced on a log scale; between them log times are interpolated."""

SOFT_ERROR = 0.1
"""Log errors above this weigh less than their square: one odd row must not move a constant."""

SAYS_SOMETHING = 0.02
"""A constant whose whole range moves no row by this share is not known from these rows."""

SWEEPS = 3
"""Rounds over the constants, each fitted with the others held, at most."""


@dataclass(frozen=True)
class Judged:
    """One run with its forecast; errors are forecast / measured - 1."""

    run: Run
    failure: str | None = None
    """Why it could not be priced; then the rest is None."""
    predicted_s: float | None = None
    inside: bool | None = None
    """Whether the forecast's band holds what was measured; None without a step time."""
    error: float | None = None
    allocated_error: float | None = None
    reserved_error: float | None = None
    """Of reserved memory, or of the whole device's where that alone was read."""
    fit_probability: float | None = None
    seconds: float | None = None
    """That one call took, on this machine."""

    @property
    def fit_mistaken(self) -> bool:
        """It ran and was as good as excluded, or did not and was as good as promised."""
        p = self.fit_probability
        return p is not None and (p < 0.05 if self.run.ran else p > 0.95)


def judge(run: Run, simulate: Simulate) -> Judged:
    """Price one run; what cannot be priced is kept with the reason."""
    start = time.perf_counter()
    try:
        with differing(run.differs):
            found = simulate(**run.arguments)
    except Exception as error:
        return Judged(run, failure=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start

    def off(predicted: float, measured: float | None) -> float | None:
        return predicted / measured - 1.0 if measured else None

    on_device = off(sum(found.memory.values()), run.device_bytes)
    return Judged(
        run,
        predicted_s=found.step_time_s,
        inside=found.step_time_low_s <= run.measured_s <= found.step_time_high_s if run.measured_s else None,
        error=off(found.step_time_s, run.measured_s),
        allocated_error=off(found.memory_allocated_bytes, run.allocated_bytes),
        reserved_error=off(found.memory_reserved_bytes, run.reserved_bytes) if run.reserved_bytes else on_device,
        fit_probability=found.fit_probability,
        seconds=seconds,
    )


def judge_all(runs: Sequence[Run], simulate: Simulate, words: str = "pricing") -> list[Judged]:
    """``judge`` for each, with progress on stderr."""
    found = []
    for number, run in enumerate(runs, start=1):
        found.append(judge(run, simulate))
        if number % 100 == 0 or number == len(runs):
            print(f"{words}: {number}/{len(runs)}", file=sys.stderr, flush=True)
    return found


@contextmanager
def differing(features: Mapping[str, bool]) -> Iterator[None]:
    """Engines that have or do not have these features of their releases while the block runs."""
    if not features:
        yield
        return
    has = releases.has

    def of_program(engine: str, feature: str, version: str | None) -> bool:
        return features[feature] if feature in features else has(engine, feature, version)

    step._pricer.cache_clear()  # pricers know a layout's features by the release alone
    try:
        with patch.object(releases, "has", of_program):
            yield
    finally:
        step._pricer.cache_clear()


@contextmanager
def using(values: Mapping[str, float]) -> Iterator[None]:
    """Other values of the step constants while the block runs."""
    changed = {name: replace(c, value=values.get(name, c.value)) for name, c in steps.constants().items()}
    step._pricer.cache_clear()  # pricers may hold what follows from a constant
    try:
        with patch.object(steps, "constants", return_value=changed):
            yield
    finally:
        step._pricer.cache_clear()


class Fit:
    """Fits the step constants to runs; what was priced once is kept, so that leaving a source out costs no pricing."""

    def __init__(self, runs: Sequence[Run], simulate: Simulate) -> None:
        self._simulate = simulate
        self._times: dict[tuple[str, str, tuple[float, ...]], float] = {}
        sources: dict[str, list[Run]] = defaultdict(list)
        for run in runs:
            if run.measured_s:
                sources[run.source].append(run)
        self._sources = {
            name: own[:: math.ceil(len(own) / ROWS_OF_A_SOURCE)] for name, own in sources.items()
        }  # fmt: skip

    def values(self, without: str | None = None) -> dict[str, float]:
        """Every constant, fitted to its sources but one; without any row that says something, its ``unknown``."""
        values = {name: constant.value for name, constant in steps.constants().items()}
        for _ in range(SWEEPS):
            before = dict(values)
            for name in values:
                values[name] = self._one(name, values, without)
            if values == before or len(values) == 1:
                break
        return values

    def _one(self, name: str, values: Mapping[str, float], without: str | None) -> float:
        constant = steps.constants()[name]
        grid = np.geomspace(constant.low, constant.high, GRID_POINTS)
        rows, weights = [], []
        for source in constant.derived_from:
            if source == without:
                continue
            any_engine = not constant.engines
            own = [run for run in self._sources.get(source, []) if any_engine or run.engine in constant.engines]
            found = np.array([self._log_errors(own, {**values, name: float(at)}) for at in grid]).T
            found = found[~np.isnan(found).any(axis=1)] if own else []
            rows += list(found)
            weights += [1.0 / max(1, len(found))] * len(found)
        if not rows or np.ptp(np.array(rows), axis=1).max() < SAYS_SOMETHING:
            return constant.unknown
        curves, votes = np.array(rows), np.array(weights)

        def loss(at: float) -> float:
            errors = np.array([np.interp(at, np.log(grid), curve) for curve in curves])
            return float(votes @ (np.sqrt(1.0 + (errors / SOFT_ERROR) ** 2) - 1.0))

        found = minimize_scalar(loss, bounds=(np.log(grid[0]), np.log(grid[-1])), method="bounded")
        return float(f"{math.exp(found.x):.2g}")  # two digits: more is noise

    def _log_errors(self, runs: Sequence[Run], values: Mapping[str, float]) -> list[float]:
        """Of each run under these values; nan where it cannot be priced."""
        point = tuple(values.values())
        missing = [run for run in runs if (run.source, run.id, point) not in self._times]
        if missing:
            with using(values):
                for run in missing:
                    self._times[run.source, run.id, point] = judge(run, self._simulate).predicted_s or math.nan
        return [math.log(self._times[run.source, run.id, point] / run.measured_s) for run in runs if run.measured_s]


def leave_one_out(
    judged: Sequence[Judged], fit: Fit, simulate: Simulate
) -> tuple[list[Judged], dict[str, dict[str, float]]]:
    """Every run under constants fitted without its own source; and those constants, by the source left out.

    Sources that no constant was derived from are judged as they are.
    """
    named = sorted({source for constant in steps.constants().values() for source in constant.derived_from})
    found = {(one.run.source, one.run.id): one for one in judged}
    constants = {}
    for source in named:
        runs = [one.run for one in judged if one.run.source == source and not one.failure]
        if not runs:
            continue
        print(f"fitting without {source}", file=sys.stderr, flush=True)
        constants[source] = fit.values(without=source)
        with using(constants[source]):
            again = judge_all(runs, simulate, f"{source} under constants from the others")
        found |= {(one.run.source, one.run.id): one for one in again}
    return [found[one.run.source, one.run.id] for one in judged], constants
