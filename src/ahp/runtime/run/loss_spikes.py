"""Steps whose loss or gradient norm lies far above those of the steps before: a sign of bad data, or of training about to diverge.

The rule is OLMo 2's spike score (arXiv 2501.00656), seven standard deviations from a rolling average, but with the median and the
median absolute deviation in their place: the spikes themselves hardly move these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

DEVIATIONS = 7.0
"""As in OLMo 2."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
WINDOW_STEPS = 200
"""[Empirical] OLMo 2 takes 1000; runs here are shorter, and a loss that still falls should not have its beginning in the window."""
FIRST_STEPS = 50
"""[Empirical] Steps after the warm-up before anything is called a spike: a shorter curve does not show its spread."""
LEAST_DEVIATION = {"loss": 0.01, "grad_norm": 0.1}
"""[Empirical] As shares of the median, for curves that hardly move: a spike is at least 7 % above the loss, 70 % above the norm."""
KEPT = 20
"""How many of the newest spikes status.json keeps; metrics.jsonl has all."""


@dataclass
class LossSpikes:
    """The recent steps and the spikes found so far. Call ``after`` with each step's record."""

    warmup_steps: int
    recent: dict[str, deque[float]] = field(
        default_factory=lambda: {key: deque(maxlen=WINDOW_STEPS) for key in LEAST_DEVIATION}, init=False
    )
    found: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT), init=False)
    """For each spike: the step, of what (loss or grad_norm), the value and the median before."""
    last_step: int = field(default=-1, init=False)
    """Step of the last spike."""

    @property
    def kept(self) -> list[dict[str, Any]]:
        """For status.json."""
        return list(self.found)

    def read(self, records: Iterable[dict[str, Any]]) -> None:
        """Take in the records that an earlier start wrote to metrics.jsonl."""
        for record in records:
            self.after(record)

    def after(self, record: dict[str, Any]) -> dict[str, bool]:
        """Fields to add to a step's record of metrics.jsonl: ``loss_spike`` and ``grad_norm_spike``, for each that is a spike."""
        marks: dict[str, bool] = {}
        for key, values in self.recent.items():
            value = record.get(key)
            if value is None or not math.isfinite(value) or record["step"] <= self.warmup_steps:
                continue
            if len(values) >= FIRST_STEPS and value > limit(values, LEAST_DEVIATION[key]):
                marks[f"{key}_spike"] = True
                self.found.append({"step": record["step"], "of": key, "value": value, "median": median(values)})
            values.append(value)
        return marks

    def news(self, step: int) -> str | None:
        """Message about a step that was a spike; None if it was none, or if the step before was a spike too."""
        here = [spike for spike in self.found if spike["step"] == step]
        if not here:
            return None
        goes_on, self.last_step = self.last_step == step - 1, step
        if goes_on:
            return None
        what = {"loss": "loss", "grad_norm": "gradient norm"}
        spikes = (f"{what[one['of']]} {one['value']:.4g}, the median before was {one['median']:.4g}" for one in here)
        return f"step {step}: a spike: {'; '.join(spikes)} (docs/train/run-folder.md; marked in metrics.jsonl and status.json)"


def limit(values: Iterable[float], least_share: float) -> float:
    """The value above which a step is a spike."""
    known = list(values)
    middle = median(known)
    spread = MAD_TO_DEVIATION * median(abs(value - middle) for value in known)
    return middle + DEVIATIONS * max(spread, least_share * abs(middle))
