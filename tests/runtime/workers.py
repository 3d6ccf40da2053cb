"""The pool of processes that tests of distributed code share: that of the benchmarks, with what these tests import."""

from benchmarks import workers


class Pool(workers.Pool):
    PRELOAD = (*workers.PRELOAD, "tests.runtime.test_families", "tests.runtime.warm")
