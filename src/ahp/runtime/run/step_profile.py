"""What a few steps of a run do when: torch's profiler, and on a GPU the history of its memory (``run.profile``)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ahp.runtime.torch_compat import begin_memory_history, end_memory_history


class StepProfile:
    """Of every rank, from the beginning of the first of some steps to the end of the last: ``rank-N.json.gz`` for ui.perfetto.dev,
    ``memory-rank-N.pickle`` for pytorch.org/memory_viz. Files that are there already are replaced."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int, device: torch.device) -> None:
        """``steps``: the first and the last one, as metrics.jsonl counts them."""
        self.steps, self.folder, self.rank, self.device = steps, folder, rank, device
        self.running: Any = None

    def alone(self, step: int) -> bool:
        """Whether the device must have done everything before this step, and this step before the next: so that the profile has its own
        steps alone."""
        return self.steps is not None and step in (self.steps[0] - 1, self.steps[1])

    def step(self, step: int) -> AbstractContextManager[Any]:
        """What a step is taken within."""
        if self.steps is None or not self.steps[0] <= step <= self.steps[1]:
            return nullcontext()
        if self.running is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
            self.running = profile(activities=activities, record_shapes=True)
            begin_memory_history(self.device)
            self.running.start()
        return record_function(f"step {step}")

    def after(self, step: int) -> None:
        """Write the files where this was the last of the steps."""
        if self.steps is not None and step >= self.steps[1]:
            self.close()

    def close(self) -> None:
        """Write what there is, if a profile is running."""
        if self.running is None:
            return
        running, self.running = self.running, None
        running.stop()
        self.folder.mkdir(exist_ok=True)
        running.export_chrome_trace(str(self.folder / f"rank-{self.rank}.json.gz"))
        end_memory_history(self.device, self.folder / f"memory-rank-{self.rank}.pickle")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        elif self.running is not None and self.device.type == "cpu":  # a GPU may not answer any more
            self.running.stop()
