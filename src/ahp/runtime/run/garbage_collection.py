"""Python's garbage collector, at the same steps on every rank.

Left alone it runs when a rank has made so many objects, on each rank at another moment, and all others wait in the next collective. Before the
first step it goes again and again through the modules of torch and transformers, which stay. [Empirical] 0.9 of the 5.5 s of processor time
that their imports take.
"""

from __future__ import annotations

import gc
from typing import Self

from ahp.frozen_objects import has_frozen

EVERY_STEPS = 50
"""As torchtitan's ``gc_freq`` (torchtitan/config/job_config.py): a step leaves few objects in cycles, and their tensors are kept until then."""


class GarbageCollection:
    """While this is open, garbage is collected after the first step and after every fiftieth, and at no other time. What was never opened does
    nothing.

    What is there after the first step (modules, hooks, compiled code) stays until the end and is not looked through again. Where
    the program has turned the collector off, or frozen objects itself, nothing is changed.
    """

    def __init__(self) -> None:
        self.steers = self.began = False

    def __enter__(self) -> Self:
        self.steers = gc.isenabled() and not has_frozen()
        if self.steers:
            gc.disable()
        return self

    def after(self, step: int) -> None:
        """``step``: as metrics.jsonl counts, from 1."""
        if not self.steers or (self.began and step % EVERY_STEPS):
            return
        gc.collect()
        if not self.began:
            gc.freeze()
        self.began = True

    def __exit__(self, *error: object) -> None:
        if self.steers:
            gc.unfreeze()
            gc.enable()
