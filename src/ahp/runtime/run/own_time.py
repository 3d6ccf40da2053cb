"""A rank's own time in a step: all ranks' steps end together, so step times do not show which rank is slow.

Own time excludes waiting for other ranks. On a CPU it is the processor time of the training thread, which sleeps while it waits for a
collective, plus the time for which that thread could have run but had no core (Linux counts it; it grows if the process is niced, bound to
a core that others use, or throttled by its container). On a GPU, where kernels that wait for other ranks look like kernels that compute, it
is the time of a product of two matrices, measured now and then. Both add the wait for the rows of a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

STEPS = 20
"""Steps per median: one step that the system interrupts does not count."""
STEPS_BETWEEN_PRODUCTS = 5
"""Steps between two measurements on a GPU."""
PRODUCT = 2048
"""Rows and columns of the matrices, bf16: three of them take 24 MiB."""
PRODUCTS = 16
"""Products in a row, 0.27 TFLOP: half a millisecond on an H100, so that the clock's grain (0.5 us) and the first launch hardly count."""
SCHEDULER = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds on a core, nanoseconds waiting for a core, and time slices, of the thread that reads it."""


class OwnTime(NamedTuple):
    """Seconds of a step, each the median over the last ``STEPS``."""

    computing_s: float
    """Processor time; on a GPU the time of the products."""
    waiting_for_core_s: float
    """0 if the system does not count it, and on a GPU."""
    waiting_for_data_s: float
    step_s: float
    """From the beginning of one step to the beginning of the next; the same for all ranks."""


class Stopwatch:
    """Times the steps of this rank. ``device``: where it computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.computing: deque[float] = deque(maxlen=STEPS)
        self.for_core: deque[float] = deque(maxlen=STEPS)
        self.for_data: deque[float] = deque(maxlen=STEPS)
        self.steps: deque[float] = deque(maxlen=STEPS)
        self.began_s: float | None = None
        self.num_steps = 0
        self.under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.factors: tuple[torch.Tensor, ...] = ()

    @contextmanager
    def step(self, data_wait_s: float) -> Iterator[None]:
        """Wraps the call that takes a step; on a GPU that call only queues it."""
        now_s = time.perf_counter()
        if self.began_s is not None:
            self.steps.append(now_s - self.began_s)
        self.began_s = now_s
        computed_s, starved_s = time.thread_time(), waited_for_core_s()
        yield
        self.num_steps += 1
        self.for_data.append(data_wait_s)
        if self.device.type == "cuda":
            if self.num_steps % STEPS_BETWEEN_PRODUCTS == 0:
                self._multiply()
            return
        self.computing.append(time.thread_time() - computed_s)
        self.for_core.append(waited_for_core_s() - starved_s)

    def read(self) -> OwnTime | None:
        """The own time of the last ``STEPS`` steps, once every ``STEPS`` steps; None otherwise."""
        if self.num_steps % STEPS or not self.num_steps:
            return None
        self._collect()
        each = self.computing, self.for_core, self.for_data, self.steps
        return OwnTime(*(median(values) if values else 0.0 for values in each))

    def _multiply(self) -> None:
        """Queue the products after the step. Their times are read later: nothing waits for them."""
        if not self.factors:
            drawn = torch.Generator(self.device).manual_seed(
                0
            )  # zeros would draw less power; the program's own random numbers stay as they are
            shape = PRODUCT, PRODUCT
            left, right = (torch.randn(shape, generator=drawn, device=self.device).bfloat16() for _ in range(2))
            self.factors = left, right, torch.empty_like(left)
        left, right, product = self.factors
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=product)
        ended.record()
        self.under_way.append((began, ended))

    def _collect(self) -> None:
        while self.under_way and self.under_way[0][1].query():
            began, ended = self.under_way.popleft()
            self.computing.append(began.elapsed_time(ended) / 1e3)


def waited_for_core_s() -> float:
    """How long this thread could have run but had no core, since it began; 0 if the system does not count it."""
    try:
        return int(SCHEDULER.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
