"""Makes the rows of the next step while this one runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

Rows = dict[str, torch.Tensor]


class Prefetch:
    """Makes this rank's rows of each step one step ahead, in a thread. The thread ends with the ``with`` block.

    The rows depend only on the step, so nothing has to be kept or restored: the rows of a step that was not foreseen are made when
    they are asked for.
    """

    def __init__(
        self, batches: Callable[[int, range], Rows], rows: range, *, num_steps: int, device: torch.device
    ) -> None:
        """``batches``: (step, rows of the global batch) -> those rows. For a GPU they are put into pinned memory, so that a copy to
        the device does not block."""
        self.batches, self.rows, self.num_steps, self.device = batches, rows, num_steps, device
        self.thread = ThreadPoolExecutor(1, "batches", initializer=self._begin)
        self.next: tuple[int, Future[Rows]] | None = None

    def take(self, step: int) -> Rows:
        """The rows of a step, from 0. Raises the error if they could not be made."""
        ahead, self.next = self.next, None
        wanted = ahead[1] if ahead is not None and ahead[0] == step else self.thread.submit(self._make, step)
        if step + 1 < self.num_steps:
            self.next = (step + 1, self.thread.submit(self._make, step + 1))
        return wanted.result()

    def _begin(self) -> None:
        """Set the thread's GPU: by default it is the first one, and pinning would take memory there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _make(self, step: int) -> Rows:
        made = self.batches(step, self.rows)
        if self.device.type == "cuda":
            return {key: value.pin_memory() for key, value in made.items()}
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.shutdown(wait=True, cancel_futures=True)
