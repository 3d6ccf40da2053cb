"""Runs Python's garbage collector at the same steps on every rank.

Left alone it runs once a rank has made enough objects, at a different moment on each rank, and all others wait in the next collective. Before
the first step it scans the modules of torch and transformers again and again, though they stay. [Empirical] This takes 0.9 of the 5.5 s of
processor time of their imports.
"""

from __future__ import annotations

import gc
from typing import Self

from ahp.frozen_objects import has_frozen

EVERY_STEPS = 50
"""As torchtitan's ``gc_freq`` (torchtitan/config/job_config.py): a step leaves few objects in cycles; their tensors stay until collection."""


class GarbageCollection:
    """While this is open, garbage is collected after the first step and after every fiftieth, and at no other time. It does nothing if it is
    never opened.

    Objects that exist after the first step (modules, hooks, compiled code) stay until the end and are not scanned again. If the
    program has turned the collector off, or frozen objects itself, nothing is changed.
    """

    def __init__(self) -> None:
        self.steers = self.began = False

    def __enter__(self) -> Self:
        self.steers = gc.isenabled() and not has_frozen()
        if self.steers:
            gc.disable()
        return self

    def after(self, step: int) -> None:
        """``step`` counts from 1, as in metrics.jsonl."""
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
