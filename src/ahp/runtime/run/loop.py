"""The training loop of one rank: steps, metrics, checkpoints, and a clean stop."""

from __future__ import annotations

import errno
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from ahp.errors import AhpError, BadInput
from ahp.plan import Plan
from ahp.runtime.files import is_full
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run.folder import Checkpoint, RunFolder, Status
from ahp.runtime.run.stop_signal import StopRequest


class StepResult(Protocol):
    """What one optimizer step returns, the same on every rank."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def skipped(self) -> bool: ...


class Saver(Protocol):
    """What writes checkpoints beside the steps."""

    def start(self, folder: Path, complete: Callable[[dict[str, int]], None]) -> Future[None]: ...


class Parallel(Protocol):
    """What ``ahp.parallelize`` returns, as far as the loop needs it."""

    def rows(self, num_rows: int) -> range: ...
    def evaluate(self, parts: Iterable[dict[str, Tensor]]) -> float: ...
    def find_fault(self, part: dict[str, Tensor], result: Any) -> str: ...
    def step(self, part: dict[str, Tensor]) -> StepResult: ...
    @property
    def saver(self) -> Saver: ...
    def load(self, folder: Path) -> None: ...
    def memory_bytes(self) -> int: ...


class Diverged(AhpError):
    """The loss or the gradient is no longer a number."""


class DamagedCheckpoints(AhpError):
    """No checkpoint of the run is whole."""


class CannotWrite(AhpError):
    """The run's folder takes no more."""


@dataclass(frozen=True)
class Settings:
    """How often a run is saved."""

    checkpoint_every: int = 50
    keep: int = 3
    validate_every: int = 50
    validation_batches: int = 4


@dataclass
class CheckpointInProgress:
    """A checkpoint that is being written."""

    step: int
    done: Future[None]


@dataclass
class Loop:
    """Trains from the last complete checkpoint to the end of the job, or until it is asked to stop."""

    parallel: Parallel
    batches: Callable[[int, range], dict[str, Tensor]]
    """(step, rows of the global batch) -> those rows."""
    plan: Plan
    folder: RunFolder
    ranks: Ranks
    settings: Settings
    stop: StopRequest
    data_fingerprint: str
    validation: Callable[[int, range], dict[str, Tensor]] | None = None
    """As ``batches``, of text that is not trained on."""
    on_step: Callable[[dict[str, Any]], None] = lambda record: None
    saved: int | None = None
    """Step of the newest complete checkpoint."""
    saving: CheckpointInProgress | None = None

    def run(self) -> Status:
        """Returns what status.json says at the end (state running = all steps are done, the caller finishes).

        Raises Diverged, CannotWrite; checkpoints that were complete before stay as they are.
        """
        done = self._resume()
        while done < self.plan.job.steps:
            record, stopped = self._step(done)
            done = record["step"]
            if stopped or done == self.plan.job.steps or done % self.settings.checkpoint_every == 0:
                self._start_saving(done)
            if stopped:
                self._finish_saving()
                name = signal.Signals(stopped).name
                return self._report(Status("interrupted", done, f"stopped by {name}", 128 + stopped))
            if self.saving is not None and self.saving.done.done():
                self._finish_saving()
        self._finish_saving()
        return self._report(Status("running", done))

    def _resume(self) -> int:
        checkpoint = self._newest_whole()
        step = checkpoint.step if checkpoint is not None else 0
        if checkpoint is not None:
            before = checkpoint.meta()["data_fingerprint"]
            if before != self.data_fingerprint:
                raise BadInput(
                    f"job.data = {self.plan.job.data!r}: the text or its tokenizer has changed since step {step}; "
                    "give it back, or start a new run with another --run.folder"
                )
            self.parallel.load(checkpoint.path)
            self.saved = step
        if self.ranks.is_first:
            self.folder.truncate_metrics(step)
        self._report(Status("running", step))
        return step

    def _newest_whole(self) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as it was written; None in a new run. Says what it passes over.

        Ranks read the files between them. Raises DamagedCheckpoints when none of several is whole.
        """
        if self.ranks.is_first:
            self.folder.discard_unfinished()
            for name in self.folder.incomplete():
                self.folder.note(f"{name} is not complete and is passed over: a file of it is missing or cut")
        found = self.ranks.from_first(self.folder.checkpoints() if self.ranks.is_first else None)
        for checkpoint in reversed(found):
            name = checkpoint.damaged_file(self.ranks.rank, self.ranks.size)
            damaged = self.ranks.first_message(name)
            if damaged is None:
                return checkpoint
            if self.ranks.is_first:
                place = self.folder.put_away(checkpoint)
                self.folder.note(f"the checkpoint of step {checkpoint.step} is damaged: {damaged} has changed since it was written; "
                    f"it is put away as {place}, the one before is used")  # fmt: skip
        if found:
            raise DamagedCheckpoints(
                f"run.folder = {str(self.folder.path)!r}: every checkpoint is damaged; give one back from a copy, or start "
                "anew with another --run.folder"
            )
        return None

    def _step(self, index: int) -> tuple[dict[str, Any], int]:
        job, forecast = self.plan.job, self.plan.forecast
        began = time.perf_counter()
        part = self.batches(index, self.parallel.rows(job.global_batch_size))
        result = self.parallel.step(part)
        stopped, memory_bytes = self.ranks.highest(self.stop.pending(), self.parallel.memory_bytes())
        seconds = time.perf_counter() - began
        if not (math.isfinite(result.loss) and (math.isfinite(result.grad_norm) or result.skipped)):
            self._finish_saving()
            kept = (
                f"the checkpoint of step {self.saved} is kept"
                if self.saved is not None
                else "there was no checkpoint yet"
            )
            raise Diverged(
                f"step {index + 1}: loss = {result.loss}, gradient norm = {result.grad_norm}; "
                f"{self.parallel.find_fault(part, result)}. Training stopped, {kept}. Lower job.optimizer.learning_rate, lengthen "
                "job.optimizer.warmup_steps, or use job.precision fp32"
            )
        record = {
            "step": index + 1,
            "loss": result.loss,
            "grad_norm": None if result.skipped else result.grad_norm,
            "learning_rate": result.learning_rate,
            "tokens_per_s": job.tokens_per_step / seconds,
            "step_time_s": seconds,
            "predicted_step_time_s": forecast.step_time_s if forecast is not None else None,
            "memory_bytes": memory_bytes,
            **self._validated(index + 1),
        }
        if self.ranks.is_first:
            try:
                self.folder.append_metrics(record)
            except OSError as error:
                raise CannotWrite(self._cannot_write("metrics.jsonl", error, None)) from error
            self.on_step(record)
        return record, stopped

    def _validated(self, step: int) -> dict[str, float]:
        """``validation_loss`` where a look at the held-out text is due: after the last step, and every so often before."""
        if self.validation is None or (step % self.settings.validate_every and step != self.plan.job.steps):
            return {}
        rows = self.parallel.rows(self.plan.job.global_batch_size)
        parts = (self.validation(number, rows) for number in range(self.settings.validation_batches))
        return {"validation_loss": self.parallel.evaluate(parts)}

    def _start_saving(self, step: int) -> None:
        """Begin to write a checkpoint; it counts, and older ones go, once all of it is on the disk."""
        self._finish_saving()
        with self._explaining_write_errors(step):
            if self.ranks.is_first:
                self.folder.open_checkpoint(step)
            self.ranks.barrier()
            done = self.parallel.saver.start(self.folder.aside_for(step), partial(self._commit, step))
            self.saving = CheckpointInProgress(step, done)

    def _commit(self, step: int, checksums: dict[str, int]) -> None:
        self.folder.commit_checkpoint(step, {**self._meta(), "crc32": checksums}, self.settings.keep)

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        with self._explaining_write_errors(saving.step):
            saving.done.result()
            self.saved = saving.step
        self._report(Status("running", saving.step))

    @contextmanager
    def _explaining_write_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's own derives from BaseException
            # The free space is looked at before the unfinished files give theirs back.
            message = self._cannot_write(f"checkpoint of step {step}", error, self.saved)
            if self.ranks.is_first:
                self.folder.discard_unfinished()
            raise CannotWrite(message) from error

    def _meta(self) -> dict[str, Any]:
        plain = self.plan.model_dump(mode="json")
        kept = {key: plain[key] for key in ("model", "init_from", "job", "parallelism", "versions")}
        return {**kept, "data_fingerprint": self.data_fingerprint}

    def _cannot_write(self, what: str, error: BaseException, previous: int | None) -> str:
        reason = f"{type(error).__name__}: {error}"
        if has_no_space(error) or is_full(self.folder.path):
            reason = "the disk is full"
        kept = f"; the checkpoint of step {previous} is kept" if previous is not None else ""
        return f"run.folder = {str(self.folder.path)!r}: {what} cannot be written, {reason}{kept}"

    def _report(self, status: Status) -> Status:
        if self.ranks.is_first:
            self.folder.write_status(status)
        return status


def has_no_space(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error: itself, its causes, or the failures that torch collects from ranks."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        failures = getattr(error, "failures", None)
        if isinstance(failures, dict) and any(has_no_space(_exception(item)) for item in failures.values()):
            return True
        error = error.__cause__ or error.__context__
    return False


def _exception(item: Any) -> BaseException | None:
    # torch's CheckpointException holds (exception, stack) by rank
    candidate = item[0] if isinstance(item, tuple) and item else item
    return candidate if isinstance(candidate, BaseException) else None
