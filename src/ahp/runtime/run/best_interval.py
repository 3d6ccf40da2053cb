"""``run.checkpoint_every: auto``: the time between checkpoints that loses the least, from what they cost and how often runs fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from ahp.cluster.reliability import SECONDS_PER_HOUR, Failures, failures_per_device_hour
from ahp.run_history import Start
from ahp.words import duration, seconds

FIRST_S = 60.0
"""Until the first checkpoint of a start, which says what one costs."""
LEAST_S = 30.0
"""A failure then loses 15 s on average, no more than it takes to start workers again; files are not written without a pause."""
MOST_S = 1800.0
"""Rates of failures count devices and hosts. Whoever ends a run by mistake, or meets a loss that is no number, is not in them."""
LAST = 4
"""Checkpoints whose costs are averaged: one disturbed by a busy disk does not decide alone."""
NEWS = 1.5
"""The interval is said again where it has changed by this factor."""


@dataclass
class BestInterval:
    """Young's interval, sqrt(2 b / f), of the mean wait b for the last checkpoints and f failures a second (``Failures``)."""

    failures_per_s: float
    """Of all workers together."""
    costs_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=LAST), init=False)
    waited_s: float | None = field(default=None, init=False)
    """How long training has waited for the newest checkpoint so far; None before the first."""
    said_s: float | None = field(default=None, init=False)

    def waits(self, waited_s: float) -> None:
        """Training has waited for the checkpoint that was started last."""
        if self.waited_s is not None:
            self.waited_s += waited_s

    def starts(self) -> None:
        """A checkpoint starts: the wait for the one before is all known."""
        if self.waited_s is not None:
            self.costs_s.append(self.waited_s)
        self.waited_s = 0.0

    @property
    def seconds(self) -> float:
        """From the start of a checkpoint to the next one's."""
        known = [*self.costs_s, *([] if self.waited_s is None else [self.waited_s])]
        if not known:
            return FIRST_S
        best_s = Failures(per_s=self.failures_per_s, checkpoint_blocks_s=mean(known), restart_s=0.0).best_interval_s
        return min(max(best_s, LEAST_S), MOST_S)

    def news(self) -> str | None:
        """Why the interval is what it is, once it is known and where it has changed much."""
        if self.waited_s is None:
            return None
        now_s, said_s = self.seconds, self.said_s
        if said_s is not None and 1 / NEWS < now_s / said_s < NEWS:
            return None
        self.said_s = now_s
        cost_s = mean([*self.costs_s, self.waited_s])
        return (
            f"checkpoints every {duration(now_s)}: training waits {seconds(cost_s)} for one, and a failure is expected every "
            f"{duration(1 / self.failures_per_s)} (run.checkpoint_every auto)"
        )


def failures_per_s(cluster_rate: float | None, history: Sequence[Start], workers: int) -> float:
    """Failures a second of so many workers: the cluster's rate (for each device and hour; None = reliability.yaml) and what the run's
    starts have met. A start that failed before it made a step counts for neither: it lost nothing."""
    known = [start for start in history if start.seconds is not None and start.made_steps]
    failures = sum(start.failed for start in known)
    device_hours = sum((start.seconds or 0.0) * start.workers for start in known) / SECONDS_PER_HOUR
    return failures_per_device_hour(cluster_rate, failures, device_hours) * workers / SECONDS_PER_HOUR
