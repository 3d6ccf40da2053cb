"""``run.checkpoint_every: auto``: when the next checkpoint is due, by what the last ones cost and by how often the run failed."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ahp.cluster.reliability import defaults
from ahp.run_history import Start
from ahp.runtime.run.best_interval import FIRST_S, LAST, LEAST_S, MOST_S, BestInterval, failures_per_s

BEGAN, HOUR_LATER = "2026-11-24T10:00:00+00:00", "2026-11-24T11:00:00+00:00"
USUAL = defaults.value("failures_per_device_hour")
costs = st.floats(1e-3, 100.0)


def after(failures_per_s: float, *costs_s: float) -> BestInterval:
    interval = BestInterval(failures_per_s)
    for cost_s in costs_s:
        interval.starts()
        interval.waits(cost_s)
    return interval


def start(*, failed: bool, steps: int = 10, workers: int = 2, ended: str | None = HOUR_LATER) -> Start:
    return Start(BEGAN, "dp2", workers, 0, ended, steps, 0, "why", failed)


def test_the_first_checkpoint_says_what_one_costs() -> None:
    interval = BestInterval(1e-4)
    interval.waits(5.0)  # for nothing that was started
    assert interval.seconds == FIRST_S
    assert interval.news() is None


@given(st.floats(1e-6, 1e-3), st.lists(costs, min_size=1, max_size=LAST))
def test_then_it_is_youngs(rate: float, costs_s: list[float]) -> None:
    youngs_s = sqrt(2 * sum(costs_s) / len(costs_s) / rate)
    assert after(rate, *costs_s).seconds == pytest.approx(min(max(youngs_s, LEAST_S), MOST_S))


def test_waits_of_one_checkpoint_add_up_and_old_ones_are_forgotten() -> None:
    in_parts = after(1e-3, 1.0)
    in_parts.waits(2.0)
    assert in_parts.seconds == after(1e-3, 3.0).seconds
    assert after(1e-3, 99.0, *[2.0] * (LAST + 1)).seconds == after(1e-3, 2.0).seconds


def test_it_says_why_once_and_again_when_it_has_changed() -> None:
    interval = after(1e-4, 0.5)
    assert interval.news() == (
        "checkpoints every 100 s: training waits 500 ms for one, and a failure is expected every 2.8 h (run.checkpoint_every auto)"
    )
    assert interval.news() is None
    interval.starts()
    interval.waits(9.0)
    assert "checkpoints every 5.1 min" in (interval.news() or "")


def test_a_run_that_has_not_failed_has_the_clusters_rate() -> None:
    assert failures_per_s(None, [], 8) == pytest.approx(8 * USUAL / 3600)
    assert failures_per_s(2e-3, [], 1) == pytest.approx(2e-3 / 3600)


@pytest.mark.parametrize(
    "nothing",
    [start(failed=True, steps=0), start(failed=True, ended=None)],
    ids=["before its first step", "nobody knows when"],
)
def test_failures_that_lost_nothing_do_not_count(nothing: Start) -> None:
    assert failures_per_s(None, [nothing] * 9, 2) == failures_per_s(None, [], 2)


def test_what_a_run_meets_outweighs_what_was_said() -> None:
    """Ten failures in ten hours of two workers; the cluster was said to have one in 10 hours of a device."""
    met = failures_per_s(0.1, [start(failed=True)] * 10, 2)
    assert met == pytest.approx((1 + 10) / (10 + 20) * 2 / 3600)
    calm = failures_per_s(0.1, [start(failed=False)] * 10, 2)
    assert calm == pytest.approx(1 / (10 + 20) * 2 / 3600)
