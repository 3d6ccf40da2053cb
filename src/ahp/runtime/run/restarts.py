"""Whether workers that failed are started again, and how many of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ahp.config import Elastic
from ahp.runtime.run.failure import TrainingFailed
from ahp.words import seconds

SAME_FAILURES = 3
"""As often the same step may fail in the same way: a fault of the hardware would have come elsewhere."""
SAME_PLACE = 3
"""As often in a row, with no new checkpoint between, the worker of one place may go: then the place is lost."""


@dataclass
class Restarts:
    """The failures of one run so far."""

    elastic: Elastic
    clock: Callable[[], float] = time.monotonic
    failed: list[TrainingFailed] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)
    """When workers were started again."""

    def after(self, failure: TrainingFailed, workers: int) -> int:
        """How many workers to start after a failure of so many. Raises the failure, with the reason, where a start would not help."""
        self.failed.append(failure)
        if not failure.may_pass:
            raise failure
        left = workers - self._is_lost()
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
                f"workers were started again {len(recent)} times within {window} (run.elastic.max_restarts, restart_window_s)"
            )
        if left < self.elastic.min_workers:
            raise failure.because(
                f"{left} worker{'s' * (left != 1)} would be left, fewer than run.elastic.min_workers = {self.elastic.min_workers}"
            )
        self.began_s = [*recent, now_s]
        return left

    def _is_lost(self) -> bool:
        """Whether the place whose worker went has lost it so often, with no way made between, that it is taken for broken."""
        last = self.failed[-SAME_PLACE:]
        lost = (
            len(last) == SAME_PLACE
            and last[0].rank is not None
            and len({(one.rank, one.saved_step) for one in last}) == 1
        )
        if lost:
            self.failed.clear()  # ranks are other places now
        return lost
