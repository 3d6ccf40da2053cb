"""Profiles a few steps of a run with torch's profiler, and on a GPU records the history of its memory (``run.profile``)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ahp.runtime.torch_compat import begin_memory_history, end_memory_history


class StepProfile:
    """One profile per rank, from the beginning of the first step to the end of the last: ``rank-N.json.gz`` for ui.perfetto.dev,
    ``memory-rank-N.pickle`` for pytorch.org/memory_viz. Existing files are replaced, those of ranks that are no more too; a start that makes only
    some of the steps again leaves them as they are."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int, device: torch.device) -> None:
        """``steps``: the first and the last step to profile, counted as in metrics.jsonl."""
        self.steps, self.folder, self.rank, self.device = steps, folder, rank, device
        self.running: Any = None

    def alone(self, step: int) -> bool:
        """Whether this step must be over before the next is queued, so that the profile holds its own steps only: the step before the
        first, and the last."""
        return self.steps is not None and step in (self.steps[0] - 1, self.steps[1])

    def step(self, step: int) -> AbstractContextManager[Any]:
        """The context that a step runs in."""
        if self.steps is None or not self.steps[0] <= step <= self.steps[1]:
            return nullcontext()
        if self.running is None:
            if not self._begins(step):
                return nullcontext()
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
            self.running = profile(activities=activities, record_shapes=True)
            begin_memory_history(self.device)
            self.running.start()
        return record_function(f"step {step}")

    def _begins(self, step: int) -> bool:
        """Whether to profile from this step on: not if an earlier start has the steps before it too. Removes the profiles that are replaced."""
        assert self.steps is not None
        old = list(self.folder.glob("*rank-*"))
        if step == self.steps[0] and self.rank == 0:  # no other rank writes before this one has made the step
            for file in old:
                file.unlink(missing_ok=True)
        return step == self.steps[0] or not old

    def after(self, step: int) -> None:
        """Write the files if this was the last step to profile."""
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
