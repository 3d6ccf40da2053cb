"""``run.checkpoint_every: auto``: the time between checkpoints that loses the least, from their cost and the failure rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from ahp.cluster.reliability import SECONDS_PER_HOUR, Failures, failures_per_device_hour
from ahp.run_history import Start
from ahp.words import duration, seconds

FIRST_S = 60.0
"""Time to the first checkpoint of a start, which shows what a checkpoint costs."""
LEAST_S = 30.0
"""Shortest interval: a failure loses 15 s on average, no more than restarting workers takes, and files are not written without a pause."""
MOST_S = 1800.0
"""Longest interval: failure rates count devices and hosts only, not runs ended by mistake or by a loss that is not a number."""
LAST = 4
"""How many checkpoints' costs are averaged, so that one disturbed by a busy disk does not decide alone."""
NEWS = 1.5
"""The interval is reported again once it has changed by this factor."""


@dataclass
class BestInterval:
    """Young's interval, sqrt(2 b / f), from the mean wait b for the last checkpoints and f failures per second (``Failures``)."""

    failures_per_s: float
    """Failure rate of all workers together."""
    costs_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=LAST), init=False)
    waited_s: float | None = field(default=None, init=False)
    """How long training has waited for the newest checkpoint so far; None before the first."""
    said_s: float | None = field(default=None, init=False)

    def waits(self, waited_s: float) -> None:
        """Add time that training has waited for the newest checkpoint."""
        if self.waited_s is not None:
            self.waited_s += waited_s

    def starts(self) -> None:
        """Note that a checkpoint starts: the wait for the one before is now fully known."""
        if self.waited_s is not None:
            self.costs_s.append(self.waited_s)
        self.waited_s = 0.0

    @property
    def seconds(self) -> float:
        """Time from the start of one checkpoint to the start of the next."""
        known = [*self.costs_s, *([] if self.waited_s is None else [self.waited_s])]
        if not known:
            return FIRST_S
        best_s = Failures(per_s=self.failures_per_s, checkpoint_blocks_s=mean(known), restart_s=0.0).best_interval_s
        return min(max(best_s, LEAST_S), MOST_S)

    def news(self) -> str | None:
        """A message with the interval and its reasons, when it is first known or has changed by ``NEWS``; None otherwise."""
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
    """Failures per second of ``workers`` workers, from the cluster's rate (per device and hour; None = reliability.yaml) and the failures
    in the run's past starts. A start that failed before it made a step is ignored: it lost nothing."""
    known = [start for start in history if start.seconds is not None and start.made_steps]
    failures = sum(start.failed for start in known)
    device_hours = sum((start.seconds or 0.0) * start.workers for start in known) / SECONDS_PER_HOUR
    return failures_per_device_hour(cluster_rate, failures, device_hours) * workers / SECONDS_PER_HOUR
