"""The training loop of one rank: steps, metrics, checkpoints, and a clean stop.

On a GPU the loop is one step ahead of what it knows: it queues a step and then reads the numbers of the step before, so that the device
never waits for the host. If something depends on a step's end (a checkpoint, a validation), the loop waits for that step first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ahp import run_history
from ahp.config import OnNan
from ahp.errors import AhpError
from ahp.plan import Plan
from ahp.run_files import Status, finite
from ahp.runtime.data.prefetch import Prefetch
from ahp.runtime.host_copy import HostCopy
from ahp.runtime.peak_memory import take_peak
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run import evaluation
from ahp.runtime.run.best_interval import BestInterval
from ahp.runtime.run.cannot_write import cannot_write
from ahp.runtime.run.checkpoints import Checkpoints, Saver
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.garbage_collection import GarbageCollection
from ahp.runtime.run.notices import Notices
from ahp.runtime.run.same_job import refuse_other_text
from ahp.runtime.run.step_profile import StepProfile
from ahp.runtime.run.stop_signal import StopRequest, cause_of, exit_code_of

MOST_SKIPPED = 10
"""How many updates in a row ``run.on_nan: skip`` leaves out before it stops: one batch can be bad; ten in a row mean bad weights."""
MOST_ROLLBACKS = 3
"""How often ``run.on_nan: rollback`` goes back to one checkpoint before it stops: by then several batches have failed from those weights."""

WAY_ON = (
    "Continue with a lower job.optimizer.learning_rate, a longer job.optimizer.warmup_steps or job.precision fp32, and with "
    "--run.extend true, which allows a run to change these"
)


class StepResult(Protocol):
    """The result of one optimizer step, the same on every rank."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def failed(self) -> bool: ...


class Parallel(Protocol):
    """The part of ``ahp.parallelize``'s result that the loop needs."""

    halts_at_fault: bool

    def rows(self, num_rows: int) -> range: ...
    def evaluate(self, parts: Iterable[dict[str, Tensor]]) -> float: ...
    def find_fault(self, part: dict[str, Tensor], result: Any) -> str: ...
    def step(self, part: dict[str, Tensor]) -> StepResult: ...
    def skip_to(self, step: int) -> None: ...
    @property
    def saver(self) -> Saver: ...
    def load(self, folder: Path) -> None: ...


class Diverged(AhpError):
    """The loss or the gradient is no longer a number."""


@dataclass(frozen=True)
class Settings:
    """How often a run saves, validates and evaluates, and what it does when a loss is not a number."""

    checkpoint_every: int | None = 50
    """In steps; None if the interval is a time."""
    checkpoint_every_s: float | None = None
    failures_per_s: float = 1e-6
    """Failure rate of all workers together; sets the interval if neither of the above is given."""
    keep: int = 3
    validate_every: int = 50
    validation_batches: int = 4
    evaluation: str | None = None
    """Name of the user's function that evaluates the model (``evaluation.py``)."""
    evaluate_every: int = 100
    on_nan: OnNan = "stop"
    profile_steps: tuple[int, int] | None = None
    """The first and the last step to profile."""


class Shared(NamedTuple):
    """Numbers that ranks exchange at each step: the maximum of each over all ranks."""

    stop: int
    """Number of a signal, 0 for none."""
    checkpoint_is_due: int
    """According to the first rank's clock."""
    allocated_bytes: int
    reserved_bytes: int
    data_wait_us: int
    checkpoint_wait_us: int


@dataclass
class StepUnderWay:
    """A queued step whose numbers have not been read yet."""

    number: int
    """Counted from 1, as in metrics.jsonl."""
    part: dict[str, Tensor]
    result: StepResult
    shared: HostCopy
    own_times: HostCopy | None
    """Every rank's own time (``own_time.py``), once every ``STEPS`` steps; None at the others."""


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
    validation_fingerprint: str | None = None
    """Of held-out text that is a text of its own."""
    model_described: dict[str, Any] = field(default_factory=dict)
    """For meta.json (``same_model.py``); filled in on the first rank only."""
    validation: Callable[[int, range], dict[str, Tensor]] | None = None
    """Like ``batches``, for held-out text."""
    on_step: Callable[[dict[str, Any]], None] = lambda record: None
    garbage: GarbageCollection = field(default_factory=GarbageCollection)
    """Opened by the caller if the loop is to control it; otherwise it does nothing."""
    steps_ahead: int = 0
    """How many queued steps may be unread: 1 on a GPU, 0 on a CPU, where a step is over when its call returns."""
    done: int = field(default=0, init=False)
    """Number of the last queued step."""
    under_way: deque[StepUnderWay] = field(default_factory=deque, init=False)
    ended_s: float = field(default=0.0, init=False)
    """When the last step that was read ended, by ``time.perf_counter``."""
    stopped: int = field(default=0, init=False)
    due: bool = field(default=False, init=False)
    """Whether a checkpoint is due."""
    most_bytes: int = field(default=0, init=False)
    num_skipped: int = field(default=0, init=False)
    """How many updates in a row were left out."""
    rolled_back: bool = field(default=False, init=False)
    """Whether the run went back to a checkpoint and no step has succeeded since."""
    rollbacks: dict[int, int] = field(default_factory=dict, init=False)
    """How often the run went back to each checkpoint, keyed by its step."""
    saver: Saver = field(init=False)
    best: BestInterval | None = field(default=None, init=False)
    """Set if the settings leave the time between checkpoints open."""

    def __post_init__(self) -> None:
        same = {
            "data_fingerprint": self.data_fingerprint,
            "validation_fingerprint": self.validation_fingerprint,
            "model_described": self.model_described or None,
        }
        self.checkpoints = Checkpoints(self.plan, self.folder, self.ranks, self.settings.keep, same)
        self.profile = StepProfile(
            self.settings.profile_steps, self.folder.profile_folder, self.ranks.rank, self.ranks.device
        )
        self.notices = Notices(self.plan, self.folder, self.ranks)
        if self.settings.checkpoint_every is None and self.settings.checkpoint_every_s is None:
            self.best = BestInterval(self.settings.failures_per_s)
        self.rows = self.parallel.rows(self.plan.job.global_batch_size)
        name = self.settings.evaluation
        self.evaluation = None if name is None else evaluation.find(name)

    def run(self) -> Status:
        """Returns the last status (state running = all steps are done, and the caller finishes the run).

        Raises Diverged or CannotWrite; checkpoints that were already complete stay as they are.
        """
        self.done = self._resume()
        self.saver = self.parallel.saver  # allocates its memory while the first steps run
        self.parallel.halts_at_fault = self.settings.on_nan == "stop"
        if self.settings.on_nan == "rollback" and self.checkpoints.saved is None:
            self._save()  # something to go back to from the first step on
        self.checkpoints.started_at_s = self.ended_s = time.perf_counter()
        steps = self.plan.job.steps
        prefetch = Prefetch(self.batches, self.rows, num_steps=steps, device=self.ranks.device)
        with prefetch, self.profile, self.notices:
            while self.done < steps:
                self._queue(prefetch)
                self.due = self.due or self._is_multiple(self.settings.checkpoint_every)
                self._read(left=0 if self._must_be_over() else self.steps_ahead)
                self.garbage.after(self.done)
                if self.stopped or self.due:  # set by the steps that were just read
                    self._read(left=0)
                # Do not save a checkpoint's own weights again: only the next step shows whether they are good.
                if self.stopped or self.done == steps or (self.due and not self.rolled_back):
                    self._save()
                if self.stopped:
                    self.checkpoints.finish()
                    why = cause_of(self.stopped), exit_code_of(self.stopped)
                    return self._report(Status("interrupted", self.done, *why))
                self.checkpoints.finish(wait=False)
        self.checkpoints.finish()
        return self._report(Status("running", self.done))

    def _resume(self) -> int:
        checkpoint = self.checkpoints.newest_whole()
        step = checkpoint.step if checkpoint is not None else 0
        if checkpoint is not None:
            refuse_other_text(checkpoint, self.plan, self.data_fingerprint, self.validation_fingerprint)
            self.checkpoints.read(checkpoint, self.parallel)
        if self.ranks.is_first:
            self.folder.truncate_metrics(step)
            run_history.began_at(self.folder.history_file, step)
            self.notices.begin()
        self._report(Status("running", step))
        return step

    def _save(self) -> None:
        self.due = False
        if self.best is not None:
            self.best.starts()
        self.checkpoints.start(self.done, self.saver)

    def _is_multiple(self, every: int | None) -> bool:
        return every is not None and self.done % every == 0

    def _validates(self, step: int) -> bool:
        """Whether validation is due: after the last step, and every ``validate_every`` steps."""
        return self.validation is not None and self._is_due(step, self.settings.validate_every)

    def _evaluates(self, step: int) -> bool:
        return self.evaluation is not None and self._is_due(step, self.settings.evaluate_every)

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.plan.job.steps or step % every == 0

    def _must_be_over(self) -> bool:
        """Whether the last queued step must end before the next one is queued."""
        last = self.done == self.plan.job.steps
        looks = self._validates(self.done) or self._evaluates(self.done)
        return last or self.due or looks or self.profile.alone(self.done)

    def _queue(self, prefetch: Prefetch) -> None:
        began_s = time.perf_counter()
        part = prefetch.take(self.done)
        data_wait_s = time.perf_counter() - began_s
        with self.profile.step(self.done + 1), self.notices.step(data_wait_s):
            result = self.parallel.step(part)
        self.done += 1
        every_s = self.best.seconds if self.best is not None else self.settings.checkpoint_every_s
        due = every_s is not None and time.perf_counter() - self.checkpoints.started_at_s >= every_s
        peak = take_peak(self.ranks.device)
        waits_us = (round(1e6 * waited_s) for waited_s in (data_wait_s, self.checkpoints.take_wait_s()))
        shared = Shared(self.stop.pending(), due and self.ranks.is_first, *peak, *waits_us)
        numbers = self.ranks.highest_later(*shared), self.notices.exchanged()
        self.under_way.append(StepUnderWay(self.done, part, result, *numbers))

    def _read(self, *, left: int) -> None:
        """Wait for all steps under way except the last ``left``, and record their results."""
        while len(self.under_way) > left:
            self._finish(self.under_way.popleft())

    def _finish(self, step: StepUnderWay) -> None:
        shared = Shared(*step.shared.read().tolist())
        self.profile.after(step.number)
        now_s = time.perf_counter()
        seconds, self.ended_s = now_s - self.ended_s, now_s
        self.stopped = self.stopped or shared.stop
        self.due = self.due or bool(shared.checkpoint_is_due)
        self.most_bytes = max(self.most_bytes, shared.allocated_bytes)
        if self.best is not None:
            self.best.waits(shared.checkpoint_wait_us / 1e6)
            if news := self.best.news():
                self._note(news)
        result, forecast = step.result, self.plan.forecast
        record = {
            "step": step.number,
            "loss": None if result.failed else finite(result.loss),
            "grad_norm": None if result.failed or result.skipped else result.grad_norm,
            "learning_rate": result.learning_rate,
            "skipped": result.failed or result.skipped,
            "tokens_per_s": self.plan.job.tokens_per_step / seconds,
            "step_time_s": seconds,
            "predicted_step_time_s": forecast.step_time_s if forecast is not None else None,
            # From the forecast's FLOPs and peaks: at the forecast's step time this is the forecast's MFU.
            "mfu": forecast.mfu * forecast.step_time_s / seconds if forecast is not None else None,
            "memory_bytes": self.most_bytes,
            "memory_allocated_bytes": shared.allocated_bytes,
            "memory_reserved_bytes": shared.reserved_bytes,
            "data_wait_s": shared.data_wait_us / 1e6,
            "checkpoint_wait_s": shared.checkpoint_wait_us / 1e6,
        }
        if result.failed:
            record |= self._after_fault(step)
        else:
            self.num_skipped, self.rolled_back = 0, False
            if result.skipped and record["loss"] is None:
                self._note(f"step {step.number}: no token of its batch is scored, so its update is left out")
        record |= self.notices.after(record, step.own_times)
        self._write(record | self._validated(step.number) | self._evaluated(step.number))

    def _write(self, record: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        try:
            self.folder.append_metrics(record)
        except OSError as error:
            raise cannot_write(self.folder, "metrics.jsonl", error, self.checkpoints.saved) from error
        self.on_step(record)

    def _validated(self, step: int) -> dict[str, float | None]:
        """The loss on held-out text if validation is due, and the time it took, which counts towards no step."""
        if self.validation is None or not self._validates(step):
            return {}
        parts = (self.validation(number, self.rows) for number in range(self.settings.validation_batches))
        loss = self.parallel.evaluate(parts)
        began_s, self.ended_s = self.ended_s, time.perf_counter()
        if finite(loss) is None:
            self._note(f"step {step}: the loss on held-out text is {loss}")
        return {"validation_loss": finite(loss), "validation_time_s": self.ended_s - began_s}

    def _evaluated(self, step: int) -> dict[str, float | None]:
        """The figures of the user's evaluation function if it is due, and the time it took."""
        if self.evaluation is None or not self._evaluates(step):
            return {}
        found = evaluation.figures(str(self.settings.evaluation), self.evaluation(self.parallel, step))
        began_s, self.ended_s = self.ended_s, time.perf_counter()
        return found | {f"evaluation_{evaluation.OWN_NAME}": self.ended_s - began_s}

    # A loss or a gradient that is not a number

    def _after_fault(self, step: StepUnderWay) -> dict[str, Any]:
        """Do what ``run.on_nan`` asks for: raise Diverged, or go on and return the fields to add to the step's record."""
        if self.settings.on_nan == "rollback":
            return self._roll_back(step)
        self.num_skipped += 1
        if self.settings.on_nan == "stop":
            raise self._diverged(step)
        if self.num_skipped == MOST_SKIPPED:
            raise self._diverged(step, f"; {MOST_SKIPPED} updates in a row were left out (run.on_nan skip)")
        self._note(f"{_numbers(step)}: its update is left out (run.on_nan skip)")
        return {}

    def _roll_back(self, step: StepUnderWay) -> dict[str, Any]:
        """Go back to the weights of the newest checkpoint, and continue with the batch after the one that failed."""
        self.checkpoints.finish()
        checkpoint = self.checkpoints.newest_whole()
        assert checkpoint is not None, "the run began with one"
        times = self.rollbacks[checkpoint.step] = self.rollbacks.get(checkpoint.step, 0) + 1
        if times > MOST_ROLLBACKS:
            raise self._diverged(
                step, f"; the run went back to step {checkpoint.step} {MOST_ROLLBACKS} times (run.on_nan rollback)"
            )
        self.under_way.clear()  # steps queued after it
        self.rolled_back = True
        self.checkpoints.read(checkpoint, self.parallel)
        self.parallel.skip_to(step.number)
        self.done = step.number
        said = f"{_numbers(step)}: back to the weights of step {checkpoint.step}, without the batches since (run.on_nan rollback)"
        self._note(said)
        self._report(Status("running", step.number, said))
        self.ended_s = time.perf_counter()
        return {"rolled_back_to": checkpoint.step}

    def _diverged(self, step: StepUnderWay, why: str = "") -> Diverged:
        self.checkpoints.finish()
        saved = self.checkpoints.saved
        kept = f"the checkpoint of step {saved} is kept" if saved is not None else "there is no checkpoint yet"
        return Diverged(
            f"{_numbers(step)}; {self.parallel.find_fault(step.part, step.result)}{why}. Training stopped; {kept}. {WAY_ON}"
        )

    def _note(self, text: str) -> None:
        if self.ranks.is_first:
            self.folder.note(text)

    def _report(self, status: Status) -> Status:
        if self.ranks.is_first:
            self.folder.write_status(status)
        return status


def _numbers(step: StepUnderWay) -> str:
    return f"step {step.number}: loss = {step.result.loss:.6g}, gradient norm = {step.result.grad_norm:.6g}"
