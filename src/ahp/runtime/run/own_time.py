"""What a rank's steps take of its own: all ranks' steps end together, so a slow one does not show by how long its steps take.

A rank's own time is what it spends apart from waiting for others. On a CPU: the processor time of the thread that trains, which sleeps
while it waits for a collective, and the time for which that thread could have run and had no core (Linux counts it; it grows where a process is
niced, bound to a core that others use, or throttled by its container). On a GPU, whose kernels wait for others' without being told apart:
what a product of two matrices takes there, now and then. And the wait for the rows of a step.
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
"""Of which the median is taken: one step that the system interrupts says nothing."""
STEPS_BETWEEN_PRODUCTS = 5
"""On a GPU."""
PRODUCT = 2048
"""Rows and columns of the matrices, bf16: three of them take 24 MiB."""
PRODUCTS = 16
"""In a row, 0.27 TFLOP: half a millisecond on an H100, so that the clock's grain (0.5 us) and the first one's start do not count."""
SCHEDULER = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds on a core, nanoseconds that were waited for one, and turns, of the thread that reads it."""


class OwnTime(NamedTuple):
    """Seconds of a step, each the median over the last ``STEPS``."""

    computing_s: float
    """Processor time; on a GPU that of the products."""
    waiting_for_core_s: float
    """0 where the system does not say, and on a GPU."""
    waiting_for_data_s: float
    step_s: float
    """From the beginning of a step to that of the next: the same for all ranks."""


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
        """Around the call that takes a step; on a GPU it only queues one."""
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
        """Once in ``STEPS`` steps what they took; None after the others."""
        if self.num_steps % STEPS or not self.num_steps:
            return None
        self._collect()
        each = self.computing, self.for_core, self.for_data, self.steps
        return OwnTime(*(median(values) if values else 0.0 for values in each))

    def _multiply(self) -> None:
        """Queue the products behind the step. Their times are read later: nothing waits for them."""
        if not self.factors:
            drawn = torch.Generator(self.device).manual_seed(
                0
            )  # zeros would draw less power, and the program's numbers stay
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
    """For how long this thread could have run and had no core, since it began; 0 where the system does not say."""
    try:
        return int(SCHEDULER.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
