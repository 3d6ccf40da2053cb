"""What a layout is forecast to cost, as stored in plan.yaml."""

from __future__ import annotations

from ahp.job import Record
from ahp.read_only import ReadOnlyDict


class Forecast(Record):
    """What one layout is expected to cost. Times in seconds, memory in bytes of the fullest rank."""

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    """``low .. high`` is meant to hold the measured step time nine times out of ten."""
    tokens_per_s_per_device: float
    mfu: float
    """Model FLOPs (6 per parameter and token, plus attention; recompute not counted) over the devices' dense peak."""
    mfu_peak: str
    """Which peak and which FLOP convention ``mfu`` is against, in words."""
    memory_allocated_bytes: int
    memory_reserved_bytes: int
    fit_probability: float
    fits: bool
    step: ReadOnlyDict[float]
    """Where the time of the slowest rank goes, seconds by part."""
    memory: ReadOnlyDict[int]
    """Where the bytes of the fullest rank go, by part."""
    fullest_rank: int = 0

    @property
    def needed_bytes(self) -> int:
        """Bytes that the fullest rank needs: all parts, including those outside the allocator."""
        return sum(self.memory.values())

    @property
    def fit_words(self) -> str:
        """``fit_probability`` in two digits; rounded down if the layout does not fit, so that 0.949 does not read as the 0.95 that is asked."""
        return f"{self.fit_probability if self.fits else int(100 * self.fit_probability) / 100:.2f}"
