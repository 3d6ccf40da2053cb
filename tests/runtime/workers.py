"""The pool of processes that tests of distributed code share: that of the benchmarks."""

from benchmarks.workers import Pool

__all__ = ["Pool"]
