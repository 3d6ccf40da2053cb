"""A run's folder: plan, metrics, status and checkpoints, each whole or absent."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ahp.errors import BadInput
from ahp.job import Job
from ahp.plan import Plan
from ahp.runtime.files import crc32, flush, write_aside
from ahp.runtime.optimizer.learning_rate import learning_rate

State = Literal["running", "done", "failed", "interrupted"]


@dataclass(frozen=True)
class Status:
    """status.json: how far a run came, and why it stopped where it did."""

    state: State
    step: int
    """Optimizer steps completed."""
    cause: str | None = None
    exit_code: int | None = None
    """None while it runs."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: ``step`` optimizer steps are in it."""

    step: int
    path: Path

    def meta(self) -> dict[str, Any]:
        """Step, job, model, parallelism, data fingerprint, and the sizes and checksums of the files."""
        return json.loads((self.path / "meta.json").read_text())

    def damaged_file(self, part: int = 0, parts: int = 1) -> str | None:
        """The first file whose bytes are not those that were written, of one part of the files; None when all are.

        Reads them all, so ranks share the files: ``part`` of ``parts``.
        """
        checksums: dict[str, int] = self.meta().get("crc32", {})
        for name in sorted(checksums)[part::parts]:
            if crc32(self.path / name) != checksums[name]:
                return name
        return None


class RunFolder:
    """The files of one run. Only rank 0 writes, apart from the tensors of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.plan_file = self.path / "plan.yaml"
        self.config_file = self.path / "config.yaml"
        self.cluster_file = self.path / "cluster.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.status_file = self.path / "status.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.trace_file = self.path / "trace.json"
        self.checkpoints_folder = self.path / "checkpoints"
        self.weights_folder = self.path / "hf"
        self.profile_folder = self.path / "profile"
        self.log_folder = self.path / "log"
        self.notes_file = self.log_folder / "notes.txt"

    def create(self) -> None:
        """Make the folder. Raises BadInput when that is not possible."""
        try:
            self.log_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"run.folder = {str(self.path)!r}: cannot be made ({error.strerror})") from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other run out of the folder; the system lets go when the process ends, however it ends."""
        with (self.log_folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(
                    f"run.folder = {str(self.path)!r}: another run is writing there; wait for it, stop it, or give "
                    "another one with --run.folder"
                ) from None
            yield

    # status.json

    def status(self) -> Status | None:
        """What status.json says, None when there is none that can be read."""
        try:
            return Status(**json.loads(self.status_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write_status(self, status: Status) -> None:
        write_aside(self.status_file, json.dumps(asdict(status), indent=1) + "\n")

    # notes for the user

    def note(self, text: str) -> None:
        """Say something on stderr, and keep it for whoever started this process: a worker's stderr is a file."""
        print(text, file=sys.stderr, flush=True)
        with self.notes_file.open("a") as file:
            file.write(text + "\n")

    def take_notes(self) -> list[str]:
        """What was noted since the last time."""
        lines = self.notes_file.read_text().splitlines() if self.notes_file.exists() else []
        self.notes_file.unlink(missing_ok=True)
        return lines

    # metrics.jsonl

    def append_metrics(self, record: dict[str, Any]) -> None:
        """One line for one step."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The steps written so far; a half line, left by a killed run, ends the list."""
        records: list[dict[str, Any]] = []
        if not self.metrics_file.exists():
            return records
        for line in self.metrics_file.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def truncate_metrics(self, step: int) -> None:
        """Forget what came after ``step``: those steps are about to be computed again."""
        kept = [record for record in self.metrics() if record["step"] <= step]
        write_aside(self.metrics_file, "".join(json.dumps(record) + "\n" for record in kept))

    # checkpoints

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first. What was left half-written or has lost a file is not among them."""
        found = []
        for path in self.checkpoints_folder.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdigit() and _is_complete(path):
                found.append(Checkpoint(int(number), path))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def incomplete(self) -> list[str]:
        """Names of folders that would be checkpoints if no file of theirs were missing or cut."""
        found = (path for path in self.checkpoints_folder.glob("step-*") if path.name.removeprefix("step-").isdigit())
        return sorted(path.name for path in found if not _is_complete(path))

    def put_away(self, checkpoint: Checkpoint) -> Path:
        """Take a damaged checkpoint out of the count; its files stay for whoever wants to look at them."""
        place = checkpoint.path.with_name(checkpoint.path.name + ".damaged")
        shutil.rmtree(place, ignore_errors=True)
        checkpoint.path.rename(place)
        return place

    def aside_for(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is written until it is complete."""
        return self.checkpoints_folder / f"step-{step}.tmp"

    def open_checkpoint(self, step: int) -> Path:
        """An empty folder for the checkpoint of ``step``; ``commit_checkpoint`` makes it count."""
        aside = self.aside_for(step)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def commit_checkpoint(self, step: int, meta: dict[str, Any], keep: int) -> Checkpoint:
        """Flush the files of the open checkpoint to the disk, then rename; afterwards all but the ``keep`` newest go.

        ``meta`` goes into meta.json; its key ``crc32`` has the checksums of the files by name.
        """
        aside = self.aside_for(step)
        files = {str(f.relative_to(aside)): f.stat().st_size for f in sorted(aside.rglob("*")) if f.is_file()}
        (aside / "meta.json").write_text(json.dumps({"step": step, **meta, "files": files}, indent=1) + "\n")
        for file in [*aside.rglob("*"), aside]:
            flush(file)
        final = self.checkpoints_folder / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        flush(self.checkpoints_folder)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old.path)
        return Checkpoint(step, final)

    def discard_unfinished(self) -> None:
        """Remove whatever was being written when a run stopped."""
        for aside in [*self.checkpoints_folder.glob("step-*.tmp"), *self.path.glob("hf.tmp*")]:
            shutil.rmtree(aside, ignore_errors=True)

    # the job

    def finished(self, job: Job) -> Status | None:
        """The status of a run that has made all of the job's steps; None where something is left to do."""
        status = self.status()
        return status if status is not None and status.state == "done" and status.step == job.steps else None

    def check_same_job(self, plan: Plan, *, extend: bool = False) -> str | None:
        """Refuse to continue a run under another convergence contract. The layout may differ, the job may not.

        More steps change no step that was made under a schedule that does not look ahead. Under another, ``extend`` takes them all
        the same: the steps that were made keep the rates that they had, and those to come have the rates of the longer job.

        Returns what the user must know of that, None for nothing. Raises BadInput that names every key that differs.
        """
        if not self.checkpoints():
            return None
        before = self.checkpoints()[-1].meta()
        before["job"] = _with_defaults(before["job"])
        differ, told = [], None
        if _same_but_steps(before["job"], plan.job, before["step"]):
            told = _rates_that_differ(before["job"], plan.job, before["step"])
        else:
            differ = list(_differences(before["job"], plan.job.model_dump(mode="json"), "job"))
        if told is not None and not extend:
            differ = [f"{told}; --run.extend true goes on with these from here on"]
        for key, now in (("init_from", plan.init_from), ("model", plan.model)):
            if before.get(key) != now:
                differ.insert(0, f"{key} = {now!r} (the run has {before.get(key)!r})")
        if differ:
            raise BadInput(
                f"run.folder = {str(self.path)!r} holds a run of another job: {'; '.join(differ)}. "
                "Start a new run with another --run.folder, or give the old values to continue this one"
            )
        return told

    def check_same_text(self, plan: Plan, fingerprint: str) -> None:
        """Refuse to continue a run on other text. Raises BadInput."""
        if saved := self.checkpoints():
            refuse_other_text(saved[-1], plan, fingerprint)


def refuse_other_text(checkpoint: Checkpoint, plan: Plan, fingerprint: str) -> None:
    """Raises BadInput where the tokens are not those that the run was trained on before."""
    if checkpoint.meta().get("data_fingerprint", fingerprint) != fingerprint:
        raise BadInput(
            f"job.data = {plan.job.data!r}: the text or its tokenizer has changed since step {checkpoint.step}; "
            "give it back, or start a new run with another --run.folder"
        )


def _is_complete(path: Path) -> bool:
    try:
        files: dict[str, int] = json.loads((path / "meta.json").read_text())["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _with_defaults(job: dict[str, Any]) -> dict[str, Any]:
    """A job as an older version of AHP wrote it, with the keys that have come since."""
    try:
        return Job.model_validate(job).model_dump(mode="json")
    except ValueError:
        return job


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str) -> Iterator[str]:
    for key in sorted({*before, *now}):
        old, new, name = before.get(key), now.get(key), f"{prefix}.{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, name)
        elif old != new:
            yield f"{name} = {new!r} (the run has {old!r})"


def _same_but_steps(before: dict[str, Any], now: Job, step: int) -> bool:
    """Whether the number of steps alone differs, and leaves all steps that were made."""
    return {**before, "steps": now.steps} == now.model_dump(mode="json") and now.steps >= step


def _rates_that_differ(before: dict[str, Any], now: Job, step: int) -> str | None:
    """In words, that steps which were made would have had other learning rates in the job as it is now; None where they would not."""
    rates = [
        [learning_rate(now.optimizer, i, steps) for i in range(step + 1)] for steps in (before["steps"], now.steps)
    ]
    if rates[0][:step] == rates[1][:step]:
        return None
    first = next(i for i in range(step) if rates[0][i] != rates[1][i])
    return (
        f"job.steps = {now.steps} (the run has {before['steps']}): under the schedule {now.optimizer.schedule} the steps from "
        f"{first + 1} to {step} had other learning rates than such a job gives them: step {step} had {rates[0][step - 1]:.3g}, "
        f"step {step + 1} has {rates[1][step]:.3g}"
    )
