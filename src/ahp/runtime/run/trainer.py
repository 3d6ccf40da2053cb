"""Runs a plan to the end: starts the workers or joins them, watches them, and reports the outcome."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ahp import run_history
from ahp.config import COLLECTIVE_TIMEOUT_S, Config, Elastic, OnNan, Profile
from ahp.errors import AhpError, HardwareMismatch, bad_input
from ahp.plan import Plan, validated
from ahp.run_files import Status, read_heartbeat
from ahp.runtime.ranks import launch
from ahp.runtime.ranks.device import DeviceType, device_for, idle_gpus, local_world_size
from ahp.runtime.ranks.environment import starts_since_launch
from ahp.runtime.ranks.preparation import Preparation
from ahp.runtime.ranks.ranks import is_joined, set_gpu_variables
from ahp.runtime.ranks.watch import OWN_CAUSE_S, Watch
from ahp.runtime.run import failure
from ahp.runtime.run.best_interval import failures_per_s
from ahp.runtime.run.cannot_write import without_a_cause
from ahp.runtime.run.checkpoint_store import CheckpointStore
from ahp.runtime.run.evaluation import find as find_evaluation
from ahp.runtime.run.failure import TrainingFailed
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.given import keep, with_kept_model
from ahp.runtime.run.nodes_alike import refuse_other_folders, refuse_other_models, refuse_other_settings, texts_on_all
from ahp.runtime.run.progress import Display, following, say
from ahp.runtime.run.restarts import SAME_FAILURES, Restarts, gpus_left
from ahp.runtime.run.same_job import check_same_job
from ahp.runtime.run.stop_signal import Stopped, StopRequest, stops_at_once
from ahp.runtime.run.stored_checkpoints import StoredCheckpoints
from ahp.runtime.run.texts import Texts, prepare_texts
from ahp.runtime.run.trackers import check
from ahp.runtime.run.worker import WorkerSettings, run_rank
from ahp.words import number_of

WORKER = "ahp.runtime.run.worker"


@dataclass(frozen=True)
class Outcome:
    """How a run ended without a failure; a failed run raises."""

    folder: Path
    status: Status
    already_done: bool = False
    """The folder already held the finished run: nothing was left to do."""

    @property
    def exit_code(self) -> int:
        return self.status.exit_code or 0


class Trainer:
    """Trains a plan in a folder. The same plan and folder again continue from the last complete checkpoint.

    The layout may change between two starts; the job and the model may not. Under torchrun (its variables are set)
    every rank makes its own Trainer and they join; otherwise ``run`` starts the workers on this node. ``texts``: the texts of
    the plan's job, if they are already prepared; ``extend``: see ``check_same_job``.

    Example::

        trainer = ahp.Trainer(ahp.Plan.load("plan.yaml"), folder="runs/mine")
        trainer.run()
    """

    def __init__(
        self,
        plan: Plan,
        *,
        folder: str | Path | RunFolder = "runs/demo",
        checkpoint_every: int | str = "auto",
        keep: int = 3,
        checkpoint_store: str | None = None,
        validate_every: int = 50,
        validation_batches: int = 4,
        evaluation: str | None = None,
        evaluate_every: int = 100,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
        track: Sequence[str] = (),
        on_nan: OnNan = "stop",
        profile: Profile | dict[str, Any] | None = None,
        elastic: Elastic | dict[str, Any] | None = None,
        extend: bool = False,
        texts: Texts | None = None,
        replan: Callable[[int], Plan] | None = None,
    ) -> None:
        """The run settings are the keys of the same names under ``run`` in config.yaml (docs/config.md). Raises BadInput for bad values.

        ``replan`` plans the same job for another number of workers, when places are lost or back; without it a lost place ends the run.
        """
        if not isinstance(plan, Plan):
            raise bad_input(
                "plan", type(plan).__name__, "must be a Plan", ["ahp.Plan.load('plan.yaml')", "ahp.search(...).best"]
            )
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        given = {
            "folder": str(self.folder.path if isinstance(folder, RunFolder) else folder),
            "checkpoint_every": checkpoint_every,
            "keep": keep,
            "checkpoint_store": checkpoint_store,
            "validate_every": validate_every,
            "validation_batches": validation_batches,
            "evaluation": evaluation,
            "evaluate_every": evaluate_every,
            "collective_timeout_s": collective_timeout_s,
            "track": track,
            "extend": extend,
            "on_nan": on_nan,
            "profile": profile,
            "elastic": {} if elastic is None else elastic,
        }
        run = validated(Config, {"job": plan.job, "run": given}, "Trainer").run
        if run.evaluation is not None:
            find_evaluation(run.evaluation)
        check(run.track)
        self.plan = plan
        self.settings: dict[str, Any] = {
            "checkpoint_every": run.checkpoint_every,
            "on_nan": run.on_nan,
            "profile_steps": None if run.profile is None else run.profile.steps,
            "evaluation": run.evaluation,
        }
        often = "keep", "validate_every", "validation_batches", "evaluate_every"
        self.often: dict[str, int] = {name: getattr(run, name) for name in often}
        self.collective_timeout_s = run.collective_timeout_s
        store = None if run.checkpoint_store is None else CheckpointStore.open(run.checkpoint_store)
        self.stored = None if store is None else StoredCheckpoints(store, self.folder, run.keep)
        self.track = run.track
        self.extend, self.texts, self.replan = run.extend, texts, replan
        self.elastic = run.elastic
        self.elastic.refuse(plan.parallelism.world_size, "the plan's degrees")

    def run(self) -> Outcome:
        """Train to the last step, or until SIGINT, SIGTERM or SIGUSR1, which end the run with a checkpoint. Workers that fail are started
        again as often as ``run.elastic`` allows.

        Raises:
            BadInput: the folder holds another job, or the data cannot be used.
            HardwareMismatch: the plan was made for other hardware.
            TrainingFailed: a worker failed; ``exit_code`` and status.json carry the cause.
        """
        with ExitStack() as kept:
            try:
                return self._join(kept) if is_joined() else self._launch(kept)
            except Stopped as stop:
                return Outcome(self.folder.path, self._interrupted(stop.number))

    def _launch(self, kept: ExitStack) -> Outcome:
        with stops_at_once():
            finished = self._begin(kept)
            if finished is not None:
                return finished
            with self._reported():
                order = self._own_order()
        full = self.plan.parallelism.world_size
        restarts = Restarts(self.elastic, full, places=gpus_left if order.device == "cuda" else lambda: None)
        with self._reported():
            while True:
                try:
                    with self._in_history():
                        settings = replace(self._as_it_failed(order), gpus=restarts.gpus)
                        stopped = self._start_workers(settings, restarts.is_due)
                        status = self._status_after(stopped, restarts.asked)
                except TrainingFailed as failed:
                    with stops_at_once():
                        order = self._take_up_again(failed, restarts.after(failed), order)
                else:
                    grows = restarts.asked and not stopped and status.state == "interrupted"
                    if not grows:
                        return self._ended(status)
                    with stops_at_once():
                        order = self._grow(restarts, order)

    def _own_order(self) -> WorkerSettings:
        return self._order(device_for(self.plan, self.plan.parallelism.world_size), self._texts())

    def _take_up_again(self, failed: TrainingFailed, workers: int, order: WorkerSettings) -> WorkerSettings:
        """Reset the folder to the newest checkpoint, plan again if places are lost, and report it. Returns the settings of the next start."""
        cause = str(failed).splitlines()[0]
        step = self._saved_step()
        say(f"{cause}. Starting again from {f'the checkpoint of step {step}' if step else 'the first step'}")
        if workers != self.plan.parallelism.world_size:
            if self.replan is None:
                raise failed.because(
                    f"the plan is for {number_of(self.plan.parallelism.world_size, 'worker')}, and {workers} {'is' if workers == 1 else 'are'} left"
                )
            try:
                order = self._plan_again(workers)
            except AhpError as error:
                raise failed.because(f"no plan for {number_of(workers, 'worker')}: {error}") from error
        self._take_up(f"started again: {cause}")
        return order

    def _plan_again(self, workers: int) -> WorkerSettings:
        assert self.replan is not None
        say(f"planning again for {number_of(workers, 'worker')}")
        self.plan = self.replan(workers)
        return self._own_order()

    def _grow(self, restarts: Restarts, order: WorkerSettings) -> WorkerSettings:
        """Plan for the lost places that are tried again, after the workers have saved. Returns the settings of the next start."""
        before, workers = self.plan.parallelism.world_size, restarts.grown()
        if workers != before:
            try:
                order = self._plan_again(workers)
            except AhpError as error:
                say(f"no plan for {number_of(workers, 'worker')} ({error}); continuing with {before}")
                restarts.stays(before)
        self._take_up(_grown(workers))
        return order

    @contextmanager
    def _in_history(self) -> Iterator[None]:
        """Record in the run's history that workers start, and how they ended."""
        p = self.plan.parallelism
        start = run_history.Start(_now(), p.short(), p.world_size, self._saved_step())
        run_history.began(self.folder.history_file, start)
        why, kind = "stopped", None
        try:
            yield
            status = self.folder.status()
            if status is not None:
                why = status.cause or status.state
        except TrainingFailed as failed:
            why, kind = str(failed), failed.kind
            raise
        except Exception as error:  # raised by the first worker, which may only have lost a peer that failed
            first = failure.read(self.folder)
            why, kind = (str(error), type(error).__name__) if first is None else (first.message, first.kind)
            raise
        finally:
            self._end_in_history(_now(), why, kind)

    def _end_in_history(self, ended: str, why: str, kind: str | None) -> None:
        """``why``: only its first line is kept; ``kind``: the kind of failure, None for none."""
        steps = {"last_step": failure.last_step(self.folder), "saved_step": self._saved_step()}
        began = run_history.starts(self.folder.history_file)
        first_step = began[-1].first_step if began else 0
        useful = run_history.useful(self.folder.metrics(), first_step, steps["saved_step"])
        outcome = {"why": why.partition("\n")[0], "failed": kind is not None, "kind": kind}
        run_history.ended(self.folder.history_file, ended=ended, **steps, **outcome, **useful)

    def _end_open_start(self, done: str | None) -> bool:
        """Record how the last start ended, if it was killed before it could. Returns whether it was. ``done``: why, if all steps were made."""
        history = run_history.starts(self.folder.history_file)
        if not history or history[-1].ended is not None:
            return False
        seen = read_heartbeat(self.folder.status_file) or history[-1].began
        first = failure.read(self.folder)  # written by another rank or a launcher
        if done is not None:
            self._end_in_history(seen, done, None)
        elif first is not None:
            self._end_in_history(seen, first.message, first.kind)
        else:
            self._end_in_history(seen, "gone without a word: what wrote this file was killed too", "gone")
        return True

    def _as_it_failed(self, order: WorkerSettings) -> WorkerSettings:
        """The settings with the failure rate of the workers, from the cluster and the run's past starts."""
        rate = (self.plan.cluster or {}).get("failures_per_device_hour")
        history = run_history.starts(self.folder.history_file)
        return replace(order, failures_per_s=failures_per_s(rate, history, self.plan.parallelism.world_size))

    def _saved_step(self) -> int:
        saved = self.folder.checkpoints()
        return saved[-1].step if saved else 0

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Leave the cause of an error in status.json."""
        try:
            yield
        except Exception as error:
            failure.report(self.folder, str(error), getattr(error, "exit_code", 1))
            raise

    def _status_after(self, stopped: int, growing: bool) -> Status:
        """The status that the workers left. ``stopped``: the signal that the user sent, 0 for none; it becomes the cause of an interrupted run.
        ``growing``: the workers were asked to stop so that more can start."""
        status = self.folder.status()
        if growing and not stopped and status is not None and status.state == "interrupted":
            status = replace(status, cause="a lost place is tried again")
            self.folder.write_status(status)
        if status is not None and status.state == "failed":
            raise TrainingFailed(status.cause or "failed", status.exit_code or 1)
        if not stopped or (status is not None and status.state == "done"):
            assert status is not None, "the workers ended well and left no status"
            return status
        # Workers are always stopped with SIGTERM; those that do not listen yet leave no status of their own.
        return self._interrupted(stopped)

    def _interrupted(self, number: int) -> Status:
        """The status of a run that a signal stopped. Only a process that holds the folder writes it to status.json."""
        status = Status("interrupted", self._saved_step(), f"stopped by {signal.Signals(number).name}", 128 + number)
        if self.folder.is_held:
            self.folder.write_status(status)
        return status

    def _join(self, kept: ExitStack) -> Outcome:
        world_size = int(os.environ["WORLD_SIZE"])
        device = device_for(self.plan, local_world_size())
        if world_size != self.plan.parallelism.world_size and self.folder.finished(self.plan.job) is None:
            raise HardwareMismatch(
                f"WORLD_SIZE = {world_size}: the plan {self.plan.parallelism.short()} is for "
                f"{number_of(self.plan.parallelism.world_size, 'worker')}; start that many, or plan again"
            )
        with stops_at_once():
            workers = Preparation()
            refuse_other_settings(workers, self._asked())
            finished = workers.decided_by_first(lambda: self._begin(kept), Outcome | None)
            if finished is not None:
                return finished
            self.plan = with_kept_model(self.plan, self.folder)  # the other ranks need it too
            order = self._as_it_failed(self._order(device, self._texts_of(workers)))
        set_gpu_variables(self.folder.log_folder)
        stop = StopRequest()
        stop.listen()
        display = self._display() if workers.is_first else None
        try:
            with self._in_history() if workers.is_first else nullcontext():
                status = run_rank(self.plan, self.folder, order, stop, display.update if display else _nothing)
        finally:
            if display is not None:
                display.close()
        return self._ended(status) if workers.is_first else Outcome(self.folder.path, status)

    def _ended(self, status: Status) -> Outcome:
        """The outcome, after writing status.json again with the end of the last start."""
        self.folder.write_status(status)
        return Outcome(self.folder.path, status)

    def _begin(self, kept: ExitStack) -> Outcome | None:
        """Lock the folder, check it against the plan, and write the plan into it. Returns the outcome if nothing is left to do."""
        self.folder.create()
        kept.enter_context(self.folder.held())
        if self.stored is not None:
            self.stored.fetch()
        self.plan = with_kept_model(self.plan, self.folder)
        extended = check_same_job(self.folder, self.plan, extend=self.extend)
        if self.stored is not None:  # for a finished run too: the store may lack its last checkpoint
            kept.enter_context(self.stored.kept_up())
        finished = self.folder.finished(self.plan.job)
        if finished is not None and self.folder.has_whole_weights():
            self.folder.discard_unfinished()  # files left by a kill after the last checkpoint
            self.folder.keep_newest(self.often["keep"])
            if self._end_open_start(finished.cause or finished.state):
                self.folder.write_status(finished)  # status.json lists the starts too
            return Outcome(self.folder.path, finished, already_done=True)
        self._end_open_start(None)
        with self._reported():
            self._refuse_what_fails_alike()
        lines, step = self._take_up(), self._saved_step()
        kept.enter_context(self.folder.beating())
        if step:
            say(f"continuing {self.folder.path} from step {step} of {self.plan.job.steps}")
        if lines < step:
            say(
                f"{self.folder.metrics_file} has {lines} of the {step} steps that were made; the others were damaged or lost"
            )
        if extended:
            say(extended)
        return None

    def _refuse_what_fails_alike(self) -> None:
        """Raises TrainingFailed if the last ``SAME_FAILURES`` starts by a multi-node launcher failed at the same step in the same way."""
        last = run_history.starts(self.folder.history_file)[-SAME_FAILURES:]
        alike = all(start.failed for start in last) and len({(start.last_step, start.kind) for start in last}) == 1
        if alike and starts_since_launch() > len(last) == SAME_FAILURES:
            step = last[0].last_step or 0
            raise TrainingFailed(
                f"step {step + 1} failed {SAME_FAILURES} times in the same way: {last[-1].why}", step=step
            )

    def _take_up(self, cause: str | None = None) -> int:
        """Reset the folder to its newest checkpoint and write the plan into it. Returns how many steps up to that one have a line in
        metrics.jsonl. ``cause``: why this start happens, for status.json."""
        if cause is not None:
            self.folder.create()  # somebody may have deleted the logs
        if cause is not None and self.stored is not None:
            self.stored.fetch()  # workers may have put damaged checkpoints away
        self.folder.refuse_lost_checkpoints()
        failure.forget(self.folder)
        self.folder.forget_notes()
        step = self._saved_step()
        lines = self.folder.truncate_metrics(step)
        self.plan.save(self.folder.plan_file)
        self.folder.write_status(Status("running", step, cause))
        return lines

    def _start_workers(self, order: WorkerSettings, stops_when: Callable[[], bool]) -> int:
        num_workers = self.plan.parallelism.world_size
        if order.device == "cpu" and (why := idle_gpus(num_workers)):
            say(f"computing on the CPU beside idle GPUs: {why}")
        where = order.device if order.gpus is None else f"GPUs {', '.join(map(str, order.gpus))}"
        say(f"starting {number_of(num_workers, 'worker')} on {where}: {self.plan.parallelism.short()}")
        try:
            with following(self.folder.metrics_file, self.folder.notes_file, self._display()):
                return launch.launch(
                    WORKER,
                    [str(self.folder.path), json.dumps(asdict(order))],
                    num_workers=num_workers,
                    log_folder=self.folder.log_folder,
                    watch=Watch(
                        self.folder.metrics_file, self.collective_timeout_s + OWN_CAUSE_S, self.collective_timeout_s
                    ),
                    stops_when=stops_when,
                )
        except launch.WorkersEnded as ended:
            why = self._why(ended)
            self.folder.discard_unfinished()
            raise why from None
        finally:
            self.folder.forget_notes()

    def _why(self, ended: launch.WorkersEnded) -> TrainingFailed:
        logs = f"the workers' output: {self.folder.log_folder}"
        step = failure.last_step(self.folder)
        if failure.read(self.folder) is None and (cannot_write := without_a_cause(self.folder, step)) is not None:
            return cannot_write
        if ended.hang:
            text = f"{failure.of_hang(self.folder, ended.hang)}; {logs}"
            return self._of_rank(text, step, "hang", list(ended.killed), may_pass=step > 0)
        if ended.killed:
            rank, number = next(iter(ended.killed.items()))
            hint = " (often because the system is out of memory)" if number == signal.SIGKILL else ""
            # SIGABRT names no culprit: NCCL's watchdog aborts the workers that wait for the one that hangs.
            gone = [] if number == signal.SIGABRT else [rank]
            text = f"worker {rank} was ended by {number.name} after step {step}{hint}; {logs}"
            return self._of_rank(text, step, number.name, gone, may_pass=True)
        cause = failure.read(self.folder)
        if cause is not None:
            # A failure before the very first step is the job's fault rather than a machine's.
            may_pass = cause.may_pass and step > 0
            text = f"{cause.message}\n{logs}"
            return self._of_rank(text, step, cause.kind, cause.missing, may_pass=may_pass, exit_code=cause.exit_code)
        text = f"workers ended with exit codes {ended.exit_codes}; {logs}\n{launch.last_words(self.folder.log_folder)}"
        return TrainingFailed(text, step=step, kind=str(ended.exit_codes), may_pass=step > 0)

    def _of_rank(
        self, text: str, step: int, kind: str, ranks: Sequence[int], *, may_pass: bool, exit_code: int = 1
    ) -> TrainingFailed:
        """A failure, with its rank if exactly one is known."""
        rank = ranks[0] if len(ranks) == 1 else None
        saved = self._saved_step()
        return TrainingFailed(text, exit_code, step=step, kind=kind, rank=rank, saved_step=saved, may_pass=may_pass)

    def _order(self, device: DeviceType, texts: Texts) -> WorkerSettings:
        return WorkerSettings(
            corpora=texts.corpora, device=device, validation=texts.validation, collective_timeout_s=self.collective_timeout_s,
            track=self.track, **self.often, **self.settings,
        )  # fmt: skip

    def _asked(self) -> dict[str, Any]:
        """What every rank must be given alike."""
        plan = self.plan.model_dump(mode="json", include={"model", "init_from", "job", "parallelism", "engine"})
        run = {**self.settings, **self.often, "collective_timeout_s": self.collective_timeout_s}
        return json.loads(json.dumps({**plan, "run": run}))

    def _texts_of(self, workers: Preparation) -> Texts:
        """The texts. Raises BadInput on a node that has others, or another model."""

        def prepared() -> Texts:
            with self._reported():
                return self._texts()

        refuse_other_folders(workers, self.folder)
        texts = texts_on_all(workers, self.plan, self.folder, prepared)
        refuse_other_models(workers, self.plan)
        return texts

    def _texts(self) -> Texts:
        """The texts, checked against the job so that nothing is refused after the workers have started."""
        texts = self.texts or prepare_texts(self.plan, self.folder)
        keep(self.plan, self.folder)
        return texts

    def _display(self) -> Display:
        forecast = self.plan.forecast
        return Display(steps=self.plan.job.steps, predicted_s=forecast.step_time_s if forecast is not None else None)


def _grown(workers: int) -> str:
    return f"started again: a lost place is tried again, with {number_of(workers, 'worker')}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _nothing(record: dict[str, Any]) -> None:
    """Ranks other than the first show no progress."""
