"""Copies a run's newest checkpoint to an object store, and fetches it from there if the run's folder has lost it.

A run still continues from its folder. The process that started the workers copies complete checkpoints in a thread: no step waits for a
store, and a failed copy is reported, counted and tried again.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ahp.errors import BadInput
from ahp.runtime.files import flush, write_aside
from ahp.runtime.run.checkpoint_store import CheckpointStore, Manifest, manifest_of, reason
from ahp.runtime.run.folder import Checkpoint, RunFolder
from ahp.runtime.run.progress import say
from ahp.runtime.run.stop_signal import Stopped, stops_at_once

LOOK_S = 2.0
"""Time between two looks for a new checkpoint. By default checkpoints come every 30 s at most (``best_interval.py``)."""
RETRY_S = 60.0
"""[Empirical] Time to the next try after a store has failed: fsspec's own libraries have tried for seconds by then."""


@dataclass
class StoredCheckpoints:
    """The stored checkpoints of one run."""

    store: CheckpointStore
    folder: RunFolder
    keep: int
    failures: int = 0
    """How often the store did not take a checkpoint."""
    last_failure: str | None = None
    copied: tuple[int, Manifest] | None = None
    """The newest checkpoint known to be in the store: its step and files."""
    ended: threading.Event = field(default_factory=threading.Event)

    def fetch(self) -> None:
        """Copy the store's newest checkpoint into the run's folder if that has none as new. Damaged ones are passed over with a message.

        Raises BadInput if the folder has no checkpoint and the store cannot be read, or has only unusable ones: a start would begin at step 0.
        """
        newest = max((checkpoint.step for checkpoint in self.folder.checkpoints()), default=None)
        try:
            stored = self.store.complete()
        except Exception as error:
            if newest is None:
                raise self._no_checkpoint(f"it cannot be read ({reason(error)})") from None
            say(
                f"{self.store.url} cannot be read ({reason(error)}); going on with the run's folder, from step {newest}"
            )
            return
        if stored:
            self.copied = max(stored.items())
        for step in sorted(stored, reverse=True):
            if newest is not None and step <= newest:
                return
            try:
                self._adopt(step, stored[step])
            except Exception as error:
                say(
                    f"the checkpoint of step {step} in {self.store.url} cannot be used ({reason(error)}) and is passed over"
                )
            else:
                say(f"the checkpoint of step {step} is taken from {self.store.url}")
                return
        if stored and newest is None:
            raise self._no_checkpoint("none of its checkpoints can be used")

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Inside the block, a thread copies each new checkpoint; the end waits for the newest copy, or for the next signal to stop."""
        self.ended.clear()
        thread = threading.Thread(target=self._keep_up, name="checkpoint-store", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            try:
                with stops_at_once():
                    thread.join()
            except Stopped:
                say(
                    f"stopped before the newest checkpoint was in {self.store.url}; the next start of the run copies it"
                )
            if self.failures:
                say(
                    f"{self.store.url} failed {self.failures} time{'s' * (self.failures > 1)}, last: {self.last_failure}"
                )

    def _keep_up(self) -> None:
        while True:
            is_last = self.ended.is_set()
            went_well = self._copy_newest()
            if is_last:
                return
            self.ended.wait(LOOK_S if went_well else RETRY_S)

    def _copy_newest(self) -> bool:
        """Copy the newest complete checkpoint unless the store has it; older ones in between are skipped. Returns False if it failed."""
        checkpoint = max(self.folder.checkpoints(), key=lambda found: found.step, default=None)
        if checkpoint is None:
            return True
        try:
            now = checkpoint.step, manifest_of(checkpoint)
            if self.copied == now:
                return True
            self.store.put(checkpoint)
            self.copied = now
            self.store.keep_newest(self.keep, put=checkpoint.step)
        except Exception as error:
            if not checkpoint.path.exists():
                return True  # newer checkpoints have taken its place in the run's folder
            self.failures, self.last_failure = self.failures + 1, reason(error)
            say(
                f"the checkpoint of step {checkpoint.step} is not in {self.store.url} ({self.last_failure}); training goes on with the run's "
                f"folder, the store is tried again in {RETRY_S:.0f} s"
            )
        self._write_down()
        return self.copied is not None and self.copied[0] == checkpoint.step

    def _write_down(self) -> None:
        step = None if self.copied is None else self.copied[0]
        state = {"url": self.store.url, "step": step, "failures": self.failures, "last_failure": self.last_failure}
        with suppress(OSError):
            write_aside(self.folder.path / "checkpoint_store.json", json.dumps(state, indent=1) + "\n")

    def _adopt(self, step: int, manifest: Manifest) -> None:
        aside = self.folder.open_checkpoint(step)
        try:
            self.store.fetch(step, manifest, aside)
            for file in [*aside.iterdir(), aside]:
                flush(file)
            final = Checkpoint(step, self.folder.checkpoints_folder / f"step-{step}")
            shutil.rmtree(final.path, ignore_errors=True)
            aside.rename(final.path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _no_checkpoint(self, why: str) -> BadInput:
        return BadInput(
            f"run.checkpoint_store = {self.store.url!r}: {why}, and run.folder = {str(self.folder.path)!r} has no checkpoint, so the run "
            "would begin again at step 0. Make the store reachable, or start anew with another --run.checkpoint-store"
        )
