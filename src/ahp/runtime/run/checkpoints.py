"""The checkpoints of a run: written while training goes on, counted when complete, and found again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint import CheckpointException

from ahp.errors import AhpError
from ahp.plan import Plan
from ahp.run_files import Status
from ahp.runtime.files import crc32
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run.cannot_write import cannot_write, reason_of
from ahp.runtime.run.folder import Checkpoint, RunFolder
from ahp.runtime.weights.same_tensors import OtherTensors


class Saver(Protocol):
    """Writes checkpoints while steps run."""

    def start(self, folder: Path, complete: Callable[[dict[str, int]], None]) -> Future[None]: ...


class DamagedCheckpoints(AhpError):
    """No checkpoint of the run is whole."""


class UnreadableCheckpoint(AhpError):
    """A whole checkpoint does not fit the model."""


class Loads(Protocol):
    """Loads the tensors of a checkpoint."""

    def load(self, folder: Path) -> None: ...


@dataclass
class CheckpointInProgress:
    """A checkpoint that is being written."""

    step: int
    done: Future[None]


@dataclass
class Checkpoints:
    """The checkpoints of one run. All ranks call every method."""

    plan: Plan
    folder: RunFolder
    ranks: Ranks
    keep: int
    same: dict[str, Any]
    """What a start compares besides the plan, for meta.json: the text's fingerprint and the model's description."""
    saved: int | None = None
    """Step of the newest complete checkpoint."""
    saving: CheckpointInProgress | None = None
    started_at_s: float = 0.0
    """When the newest checkpoint was begun, by ``time.perf_counter``."""
    waited_s: float = 0.0
    """How long training has waited for checkpoints since the last ``take_wait_s``."""

    def newest_whole(self) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as it was written; None in a new run. Notes the checkpoints that it passes over.

        Ranks split the files to read. Raises DamagedCheckpoints if there are checkpoints and none is whole.
        """
        if self.ranks.is_first:
            self.folder.discard_unfinished()
            for name, fault in self.folder.incomplete().items():
                self.folder.note(f"{name} is not complete and is passed over: {fault}")
        found = self.ranks.from_first(self.folder.checkpoints() if self.ranks.is_first else None)
        for checkpoint in reversed(found):
            name = checkpoint.damaged_file(self.ranks.rank, self.ranks.size)
            damaged = self.ranks.first_message(name)
            if damaged is None:
                self.saved = checkpoint.step
                return checkpoint
            if self.ranks.is_first:
                place = self.folder.put_away(checkpoint)
                self.folder.note(f"the checkpoint of step {checkpoint.step} is damaged: {damaged} has changed since it was written; "
                    f"it is put away as {place}, the one before is used")  # fmt: skip
        if found:
            raise DamagedCheckpoints(
                f"run.folder = {str(self.folder.path)!r}: every checkpoint is damaged; put a whole copy of one into "
                f"{self.folder.checkpoints_folder}, start anew with another --run.folder, or delete this folder"
            )
        return None

    def read(self, checkpoint: Checkpoint, into: Loads) -> None:
        """Load a checkpoint. Raises UnreadableCheckpoint, with torch's first reason, if its tensors are not those of the model."""
        try:
            into.load(checkpoint.path)
        except (CheckpointException, KeyError, ValueError) as error:
            if isinstance(error, AhpError) and not isinstance(error, OtherTensors):
                raise
            raise UnreadableCheckpoint(
                f"run.folder = {str(self.folder.path)!r}: {checkpoint.path.name} does not go into the plan's model: {reason_of(error)}; it is "
                "another model's, or another version of AHP wrote it. Put the run's own checkpoint there, or start anew with another "
                "--run.folder"
            ) from error

    def start(self, step: int, saver: Saver) -> None:
        """Begin to write a checkpoint. Once all of it is on the disk it counts, and old ones are removed."""
        self.finish()
        with self._timed(), self._explaining_write_errors(step):
            if self.ranks.is_first:
                self.folder.open_checkpoint(step)
            self.ranks.barrier()
            self.started_at_s = time.perf_counter()
            done = saver.start(self.folder.aside_for(step), partial(self._commit, step))
            self.saving = CheckpointInProgress(step, done)

    def finish(self, *, wait: bool = True) -> None:
        """If a checkpoint is being written and is complete, record it; with ``wait``, first wait until it is complete."""
        if self.saving is None or not (wait or self.saving.done.done()):
            return
        saving, self.saving = self.saving, None
        with self._timed(), self._explaining_write_errors(saving.step):
            saving.done.result()
            self.saved = saving.step
        if self.ranks.is_first:
            self.folder.write_status(Status("running", saving.step))

    def take_wait_s(self) -> float:
        """How long training has waited for checkpoints since the last call."""
        waited_s, self.waited_s = self.waited_s, 0.0
        return waited_s

    def _commit(self, step: int, checksums: dict[str, int]) -> None:
        self.folder.commit_checkpoint(step, {**self._meta(), "crc32": checksums}, self.keep)

    def _meta(self) -> dict[str, Any]:
        plain = self.plan.model_dump(mode="json")
        kept = {key: plain[key] for key in ("model", "init_from", "job", "parallelism", "versions")}
        tokenizer = self.folder.tokenizer_file
        return {**kept, **self.same, "tokenizer_crc32": crc32(tokenizer) if tokenizer.is_file() else None}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began_s

    @contextmanager
    def _explaining_write_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's own derives from BaseException
            # Check the free space before removing the unfinished files.
            fault = cannot_write(self.folder, f"checkpoint of step {step}", error, self.saved)
            if self.ranks.is_first:
                self.folder.discard_unfinished()
            raise fault from error
