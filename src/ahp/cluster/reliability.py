"""How often devices fail, and how much of a day failures and checkpoints leave."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from ahp.shipped import Constants

SECONDS_PER_HOUR = 3600.0

defaults = Constants("ahp.cluster", "reliability.yaml")
"""The figures of failures for a user who gives none."""


def failures_per_device_hour(given: float | None, failures: int = 0, device_hours: float = 0.0) -> float:
    """The failure rate that a cluster was given (None = reliability.yaml), corrected by what a job met on it.

    The given rate counts as one failure in 1 / rate device-hours; the job's own failures and device-hours are added to these.
    So a job that meets the given rate changes nothing, and one that meets another rate soon outweighs it. (The mean of a
    gamma distribution after Poisson counts.)
    """
    rate = defaults.value("failures_per_device_hour") if given is None else given
    return (1 + failures) / (1 / rate + device_hours)


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
        """Share of the time that trains, with checkpoints at the best interval; 0 if failures leave none."""
        lost = sqrt(2.0 * self.checkpoint_blocks_s * self.per_s) + self.per_s * self.restart_s
        return max(0.0, 1.0 - lost)
