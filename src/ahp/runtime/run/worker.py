"""One rank of a training run; ``python -m ahp.runtime.run.worker FOLDER SETTINGS`` under the launcher's variables."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ahp.config import COLLECTIVE_TIMEOUT_S, OnNan, checkpoint_interval
from ahp.plan import Plan
from ahp.run_files import Status
from ahp.runtime.run import failure
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.garbage_collection import GarbageCollection
from ahp.runtime.run.stop_signal import StopRequest

if TYPE_CHECKING:
    from torch import nn

    from ahp.runtime.data.corpus import Corpus
    from ahp.runtime.ranks.ranks import Ranks
    from ahp.runtime.run.loop import Settings


@dataclass(frozen=True)
class WorkerSettings:
    """The settings that the launcher gives to every rank."""

    corpora: Sequence[str]
    """Folders of the tokenized texts, one for each of ``job.data``."""
    device: Literal["cpu", "cuda"]
    checkpoint_every: int | str
    keep: int
    validation: str | None = None
    """Folder of the tokenized held-out text, if it is not a share of the training text."""
    validate_every: int = 50
    validation_batches: int = 4
    evaluation: str | None = None
    evaluate_every: int = 100
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
    track: Sequence[str] = ()
    on_nan: OnNan = "stop"
    profile_steps: Sequence[int] | None = None
    failures_per_s: float = 1e-6
    """Failure rate of all workers together, from the cluster and the run's past starts (``best_interval.py``)."""
    gpus: Sequence[int] | None = None
    """The GPU of each worker by its number on the node, if some GPUs are left out; None: each takes the GPU of its own number."""


def run_rank(
    plan: Plan,
    folder: RunFolder,
    order: WorkerSettings,
    stop: StopRequest,
    on_step: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Status:
    """Train this rank's part of the plan, from the last checkpoint to the end or to a stop. Every rank calls this.

    Errors are recorded in the folder (``ahp.runtime.run.failure``) and raised again.
    """
    start: int | None = None
    with GarbageCollection() as garbage:
        import torch

        from ahp.graph.models import build_model
        from ahp.runtime.ranks.ranks import joined

        try:
            if order.gpus is not None:
                torch.cuda.set_device(order.gpus[int(os.environ["LOCAL_RANK"])])
            # Before ranks join: the rank that planned has imported transformers, and would wait in a collective while the others import it.
            module = build_model(plan.model, device="meta", attention=plan.engine.attention)
            with (
                joined(order.device, plan, collective_timeout_s=order.collective_timeout_s) as ranks,
                folder.held_by_workers() if ranks.is_first else nullcontext(),
                folder.beating() if ranks.is_first else nullcontext(),
            ):
                start = folder.start = ranks.from_first(folder.num_starts() if ranks.is_first else None)
                return _train(plan, module, folder, order, stop, on_step, ranks, garbage)
        except BaseException as error:
            # Its node may have been stopped or cut off for so long that the others have started again without it: the folder is theirs.
            if start is None or folder.num_starts() <= start:
                failure.record(folder, int(os.environ["RANK"]), error)
            raise


def _train(
    plan: Plan,
    module: nn.Module,
    folder: RunFolder,
    order: WorkerSettings,
    stop: StopRequest,
    on_step: Callable[[dict[str, Any]], None],
    ranks: Ranks,
    garbage: GarbageCollection,
) -> Status:
    from ahp.graph.models import is_masked
    from ahp.runtime.data import corpus as corpora
    from ahp.runtime.data.job_batches import batches_for, fingerprint_of, validation_batches_for
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.ranks.hangs import GIVE_UP_S, explained
    from ahp.runtime.run.loop import Loop
    from ahp.runtime.run.same_model import described
    from ahp.runtime.run.trackers import Trackers

    job = plan.job
    texts = [corpora.read(Path(folder), verify=False) for folder in order.corpora]
    model_described = described(plan.model, module) if ranks.is_first else {}
    masked = is_masked(module)
    batches = batches_for(job, texts, masked=masked)
    held_out = corpora.read(Path(order.validation), verify=False) if order.validation is not None else None
    validation = validation_batches_for(job, texts, held_out, masked=masked)
    trackers = Trackers(order.track, folder.path, plan, folder.note)

    def tell(record: dict[str, Any]) -> None:
        on_step(record)
        trackers.log(record)

    # If there are checkpoints, the loop reads the newest whole one, or raises if none is whole.
    resumes = ranks.from_first(bool(folder.checkpoints()) if ranks.is_first else None)
    parallel = parallelize(module, plan, device=ranks.device, initialize=not resumes)
    if ranks.is_first and parallel.attention_reason:
        print(f"job.document_mask: attention by {parallel.attention_reason}", flush=True)
    loop = Loop(
        parallel=parallel,
        batches=batches,
        plan=plan,
        folder=folder,
        ranks=ranks,
        settings=_settings(order),
        stop=stop,
        data_fingerprint=fingerprint_of(texts),
        validation_fingerprint=None if held_out is None else held_out.fingerprint,
        model_described=model_described,
        validation=validation,
        on_step=tell,
        garbage=garbage,
        steps_ahead=1 if order.device == "cuda" else 0,
    )
    if ranks.is_first:
        shutil.copyfile(texts[0].folder / "tokenizer.json", folder.tokenizer_file)
    try:
        status = loop.run()
    except Exception as error:
        step, step_time_s = failure.last_step(folder), failure.last_step_time_s(folder)
        limit_s = GIVE_UP_S + step_time_s
        cause = explained(error, parallel.mesh, parallel.hosts, step, give_up_s=limit_s, waiting=stop.ending_at_once)
        if cause is not error:
            raise cause from error
        raise
    finally:
        trackers.close()
    if status.state == "interrupted":
        return status
    _export(parallel, folder, plan, texts[0], ranks)
    status = Status("done", job.steps, None, 0)
    if ranks.is_first:
        folder.keep_newest(order.keep)  # the start before may have been killed between its last checkpoint and this
        folder.write_status(status)
    ranks.barrier()
    return status


def _settings(order: WorkerSettings) -> Settings:
    from ahp.runtime.run.loop import Settings

    steps, seconds = checkpoint_interval(order.checkpoint_every)
    return Settings(
        checkpoint_every=steps,
        checkpoint_every_s=seconds,
        failures_per_s=order.failures_per_s,
        keep=order.keep,
        validate_every=order.validate_every,
        validation_batches=order.validation_batches,
        evaluation=order.evaluation,
        evaluate_every=order.evaluate_every,
        on_nan=order.on_nan,
        profile_steps=None if order.profile_steps is None else (order.profile_steps[0], order.profile_steps[1]),
    )


def _export(parallel: Any, folder: RunFolder, plan: Plan, corpus: Corpus, ranks: Ranks) -> None:
    """Write the weights and the tokenizer as a folder that transformers reads; it is whole or absent."""

    from ahp.runtime.run import export_mark, exported
    from ahp.runtime.run.cannot_write import cannot_write

    aside = folder.path / "hf.tmp"
    try:
        if ranks.is_first:
            aside.mkdir()
        ranks.barrier()
        parallel.export_hf(aside)
        ranks.barrier()
        checksums = ranks.together(export_mark.of_weights(aside, ranks.rank, ranks.size))
        if ranks.is_first:
            exported.publish(folder, aside, plan, corpus.tokenizer(), plan.job.steps, checksums)
    except OSError as error:
        raise cannot_write(folder, "the weights in hf", error, plan.job.steps) from error


def main(argv: list[str]) -> int:
    """Run one rank of the plan in FOLDER. Returns the exit code: 0 for a clean stop too, which only status.json tells apart."""
    # The launcher asks for this worker's stack, on stderr, before it kills a worker that hangs.
    faulthandler.register(signal.SIGUSR2)
    stop = StopRequest()
    stop.listen()
    folder = RunFolder(argv[0])
    run_rank(Plan.load(folder.plan_file), folder, WorkerSettings(**json.loads(argv[1])), stop)
    return 0


def end_process(work: Callable[[], int]) -> NoReturn:
    """Do the work and end this process with its exit code, or with 1 and the trace on stderr if it raises.

    By then everything is on disk and the process group is gone, so skipping the interpreter's own shutdown loses nothing.
    In that shutdown, threads of torch's libraries can abort the process ("terminate called without an active exception"),
    and a finished run would count as failed. [Empirical] Seen at the end of a run of one worker on a busy machine of two
    cores, torch 2.13.
    """
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(lambda: main(sys.argv[1:]))
