"""Decides after a failure whether to restart the workers, how many, and when to try a lost place again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ahp.config import Elastic
from ahp.runtime.run.failure import TrainingFailed
from ahp.words import number_of, seconds

SAME_FAILURES = 3
"""How often the same step can fail in the same way before the run gives up: a hardware fault would have come at another step."""
SAME_PLACE = 3
"""How often in a row, with no new checkpoint in between, the worker of one place can die or hang before the place counts as lost."""


def gpus_left() -> int | None:
    """GPUs that the driver still counts on this node, None for a node without any."""
    from ahp.cluster.gpus import gpus

    return len(gpus()) or None


@dataclass
class Restarts:
    """The failures of one run so far, and the places lost to them.

    ``places`` counts the devices of this node now; None if only failures show how many there are.
    """

    elastic: Elastic
    full: int
    """Number of workers that the run began with."""
    clock: Callable[[], float] = time.monotonic
    places: Callable[[], int | None] = lambda: None
    failed: list[TrainingFailed] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)
    """Times at which workers were started again."""
    left_out: tuple[int, ...] = ()
    """Numbers of the GPUs that have lost their workers: spare GPUs take their places, if there are any."""
    asked: bool = False
    """Whether workers were asked to save and stop, so that more can start."""
    _workers: int = 0
    _counted: int | None = None
    """Number of places when they were last counted."""
    _left_out_before: tuple[int, ...] = ()
    _wait_s: float = 0.0
    _due_s: float = 0.0

    def __post_init__(self) -> None:
        self._workers, self._wait_s = self.full, self.elastic.restart_window_s

    @property
    def gpus(self) -> tuple[int, ...] | None:
        """The GPU of each worker; None if each takes the GPU of its own number."""
        if not self.left_out or self._counted is None:
            return None
        return tuple(number for number in range(self._counted) if number not in self.left_out)[: self._workers]

    def after(self, failure: TrainingFailed) -> int:
        """How many workers to start after a failure. Raises the failure, with the reason, if a start would not help."""
        self.asked = False
        self.failed.append(failure)
        if not failure.may_pass:
            raise failure
        left = self._left()
        last = self.failed[-SAME_FAILURES:]
        if len(last) == SAME_FAILURES and len({(one.step, one.kind) for one in last}) == 1:
            raise failure.because(f"step {failure.step + 1} failed {SAME_FAILURES} times in the same way")
        now_s = self.clock()
        recent = [began_s for began_s in self.began_s if now_s - began_s < self.elastic.restart_window_s]
        if not self.elastic.max_restarts:
            raise failure
        if len(recent) >= self.elastic.max_restarts:
            window = seconds(self.elastic.restart_window_s)
            raise failure.because(
                f"workers were started again {number_of(len(recent), 'time')} within {window} (run.elastic.max_restarts, restart_window_s)"
            )
        if left < self.elastic.min_workers:
            raise failure.because(
                f"{left} worker{'s' * (left != 1)} would be left, fewer than run.elastic.min_workers = {self.elastic.min_workers}"
            )
        self.began_s = [*recent, now_s]
        if left < self._workers:
            self._try_later(now_s, lost_again=self._workers < self.full or self._due_s > 0)
        self._workers = left
        return left

    def _left(self) -> int:
        lost, places = self._lost(), self.places()
        if places is None:
            return self._workers - (lost is not None)
        gpus = self.gpus or range(self._workers)
        if self._counted not in (None, places):  # the driver has renumbered the GPUs that are left
            self.left_out = ()
        elif lost is not None:
            self.left_out = (*self.left_out, gpus[lost])
        self._counted = places
        left = min(self._workers, places - len(self.left_out))
        if left < self._workers:
            self.failed.clear()  # ranks stand for other places now
        return left

    def _lost(self) -> int | None:
        """The place whose worker died or hung ``SAME_PLACE`` times with no new checkpoint in between, so that it counts as broken. A worker
        that hangs at the same step each time is no device's fault."""
        last = self.failed[-SAME_PLACE:]
        lost = (
            len(last) == SAME_PLACE
            and last[0].rank is not None
            and len({(one.rank, one.saved_step) for one in last}) == 1
            and (all(one.was_killed for one in last) or len({one.step for one in last}) > 1)
        )
        if not lost:
            return None
        self.failed.clear()  # ranks stand for other places now
        return last[0].rank

    def _try_later(self, now_s: float, *, lost_again: bool) -> None:
        self._wait_s *= 2 if lost_again else 1
        self._due_s = now_s + self._wait_s

    def is_due(self) -> bool:
        """Whether to try lost places again now. The caller then asks the workers to save and stop; ``grown`` returns how many to start next."""
        if self._workers >= self.full or self.asked or self.clock() < self._due_s:
            return False
        self.asked = self._wanted() > self._workers
        if not self.asked:  # the device is still away
            self._due_s = self.clock() + self.elastic.restart_window_s
        return self.asked

    def grown(self) -> int:
        """How many workers to start, after those asked to stop have stopped."""
        self.asked, self._workers = False, max(self._workers, self._wanted())
        self._counted, self._left_out_before, self.left_out = self.places(), self.left_out, ()
        return self._workers

    def stays(self, workers: int) -> None:
        """Note that there is no plan for more than ``workers`` workers; the lost places are tried again later."""
        self._workers, self.left_out = workers, self._left_out_before
        self._try_later(self.clock(), lost_again=True)

    def _wanted(self) -> int:
        places = self.places()
        return self.full if places is None else min(self.full, places)
