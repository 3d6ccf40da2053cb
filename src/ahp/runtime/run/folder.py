"""A run's folder: plan, metrics, status and checkpoints, each whole or absent."""

from __future__ import annotations

import errno
import fcntl
import json
import secrets
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from ahp import run_history
from ahp.errors import BadInput
from ahp.job import Job
from ahp.run_files import (
    HEARTBEAT_S,
    Status,
    is_by_this_process,
    read_metrics,
    read_noticed,
    read_record,
    read_saved_step,
    read_status,
    written,
)
from ahp.runtime.files import crc32, flush, write_aside, write_over
from ahp.runtime.ranks.beside import looking
from ahp.runtime.ranks.environment import run_of_changing_nodes, starts_since_launch
from ahp.runtime.run import export_mark
from ahp.whole_files import unwritable
from ahp.words import seconds

LET_GO_S = 15.0
"""How long a start of several nodes waits for the last start's workers on a node that is cut off: their launcher ends them within seconds."""
WAKE_S = 900.0
"""The same where the launchers have started workers in the folder before: the other node may be stopped with its launcher, and its first worker
writes until it wakes and finds the others gone. Storage lets go for a node that is dead."""

LEAST_ROOM = 1 << 14
"""[Empirical] Bytes that must be free at a start: twice the plan and the status of a small run. A full disk is named before anything is read."""
LOOK_S = 0.1
"""Time between two attempts to take a lock, or to see a mark."""
MARK_S = 30.0
"""How long another node may take to see what was just written: NFS keeps what it has read of a folder for 30 s (nfs(5), ``acdirmin``)."""
OWN_CHECKSUM = "crc32_of_this"
"""Key of meta.json for the checksum of its other keys: with a bit flipped it described another job."""
WORKERS_WRITE = "the workers of a start that has ended are still writing there"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, taken after ``step`` optimizer steps."""

    step: int
    path: Path

    def meta(self) -> dict[str, Any]:
        """Step, job, model, parallelism, data fingerprint, and the sizes and checksums of the files."""
        return json.loads((self.path / "meta.json").read_text())

    def damaged_file(self, part: int = 0, parts: int = 1) -> str | None:
        """The first file, in one part of the files, whose bytes have changed since they were written; None if none has.

        Reads every byte, so ranks split the files: this call checks ``part`` of ``parts``.
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
        self.heartbeat_s = HEARTBEAT_S
        self.is_held = False
        self.start = 0
        """Number of the start that this process belongs to. A rank of an earlier one, whose node was stopped in the middle of a checkpoint, wakes
        and writes on: its files must not be those of a checkpoint of the same step that others have begun since."""
        self.is_everyones = False
        """Whether it was found to be the same on all nodes."""
        self.step = 0
        """The last step that this process wrote to metrics.jsonl, or kept when it truncated the file."""
        self.noticed: dict[str, Any] | None = None
        """``slow_ranks`` and ``loss_spikes`` for status.json. None in a process that watches no steps: it keeps what another process wrote."""
        self._said: Status | None = None
        self._writing = threading.RLock()
        self.plan_file = self.path / "plan.yaml"
        self.config_file = self.path / "config.yaml"
        self.cluster_file = self.path / "cluster.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.status_file = self.path / "status.json"
        self.history_file = self.path / "starts.jsonl"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.given_folder = self.path / "init_from"
        """A copy of the folder that init_from names, without the weights (runtime/run/given.py)."""
        self.trace_file = self.path / "trace.json"
        self.checkpoints_folder = self.path / "checkpoints"
        self.weights_folder = self.path / "hf"
        self.profile_folder = self.path / "profile"
        self.log_folder = self.path / "log"
        self.notes_file = self.log_folder / "notes.txt"
        self.mark_file = self.log_folder / "mark"
        self.asked_file = self.log_folder / "asked.json"
        """What the first worker of a start on several nodes was asked for, for nodes that want to join it."""
        self.joined_file = self.log_folder / "joined"
        """Touched when workers have joined: before that, they can wait for hours for the one that prepares."""
        self.cut_metrics_file = self.log_folder / "metrics.cut.jsonl"

    def create(self) -> None:
        """Make the folder. Raises BadInput if that is not possible."""
        try:
            self.log_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable("run.folder", self.path, error) from None

    @contextmanager
    def held(self, *, wait_s: float | None = None) -> Iterator[None]:
        """Lock the folder against every other start, before anything is written. The lock ends with the process, however that ends.

        Inside the block the same object can take the lock again. ``wait_s``: how long it waits for another start to let it go; None = not at
        all, or in a worker of several nodes as long as a node that is cut off may need.
        Raises BadInput if another start holds it, if workers of a start that has ended still write, or if nothing can be written.
        """
        if self.is_held:
            yield
            return
        if wait_s is None:
            there = run_of_changing_nodes() is not None
            wait_s = 0.0 if not there else LET_GO_S if starts_since_launch() == 1 else WAKE_S
        with self._locked(".lock", "another run is writing there", wait_s):
            with self._locked(".lock.workers", WORKERS_WRITE, wait_s):
                pass
            if (fault := self.fault_of_writing()) is not None:
                raise unwritable("run.folder", self.path, fault)
            folder = next((own for name, own in vars(self).items() if name.endswith("_file") and own.is_dir()), None)
            if folder is not None:
                raise unwritable("run.folder", self.path, IsADirectoryError(errno.EISDIR, "is a folder"), where=folder)
            self.is_held = True
            try:
                yield
            finally:
                self.is_held = False

    def fault_of_writing(self) -> OSError | None:
        """The system's error when a small file is written here; None if that works."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(bytes(LEAST_ROOM))
        except OSError as error:
            return error
        return None

    @contextmanager
    def held_by_workers(self) -> Iterator[None]:
        """The first worker's lock, taken once all have joined: that worker can outlive a killed launcher by a step."""
        with self._locked(".lock.workers", WORKERS_WRITE):
            self.joined_file.touch()
            yield

    @contextmanager
    def _locked(self, name: str, why_not: str, wait_s: float = 0.0) -> Iterator[None]:
        try:
            # Not in log/: a second start would hold another lock once that is deleted.
            lock = (self.path / name).open("w")
        except OSError as error:
            raise unwritable("run.folder", self.path, error) from None
        with lock:
            try:
                try:
                    _lock(lock, time.monotonic() + min(wait_s, LET_GO_S))
                except BlockingIOError:
                    if wait_s <= LET_GO_S:
                        raise
                    limit = f"waiting up to {seconds(wait_s)} for it to let go: until it is done, or its node is gone"
                    print(f"{self.path}: {why_not}; {limit}", file=sys.stderr, flush=True)
                    _lock(lock, time.monotonic() + wait_s - LET_GO_S)
            except BlockingIOError:
                raise BadInput(
                    f"run.folder = {str(self.path)!r}: {why_not}; wait for it, stop it, or give another one with --run.folder"
                ) from None
            except OSError as error:
                raise BadInput(f"run.folder = {str(self.path)!r}: cannot be locked ({error.strerror})") from None
            yield

    # status.json

    def status(self) -> Status | None:
        """The contents of status.json; None if it is missing or unreadable."""
        return read_status(self.status_file)

    def write_status(self, status: Status) -> None:
        """Write status.json, with its writer, the time, and the step of the newest checkpoint ever complete, so that its loss is noticed.

        While a run goes on, the step is at least that of the last line of metrics.jsonl.
        """
        with self._writing:
            if status.state == "running":
                status = replace(status, step=max(status.step, self.step))
            self._said = status
            newest = max((saved.step for saved in self.checkpoints()), default=self._saved_step())
            noticed = read_noticed(self.status_file) if self.noticed is None else self.noticed
            text = json.dumps({**written(status, newest), **noticed, **self._history()}, indent=1) + "\n"
            try:
                write_aside(self.status_file, text)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                write_over(self.status_file, text)

    def _history(self) -> dict[str, Any]:
        """Every start, and how much of the time of the ended starts was useful."""
        found = run_history.starts(self.history_file)
        reached = run_history.effect(found)
        return {"starts": [start.plain() for start in found]} | ({} if reached is None else {"effect": asdict(reached)})

    def leave_mark(self) -> str:
        """Write a mark that only this folder has, and return it."""
        mark = secrets.token_hex(8)
        self.mark_file.write_text(mark)
        return mark

    def has_mark(self, mark: str) -> bool:
        """Whether this folder is the one where another node has left the mark."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < MARK_S:
            with suppress(OSError):
                if self.mark_file.read_text() == mark:
                    return True
            time.sleep(LOOK_S)
        return False

    def is_in_use(self) -> bool:
        """Whether a start holds the folder now."""
        try:
            with self._locked(".lock", ""):
                return False
        except BadInput:
            return True

    def num_starts(self) -> int:
        """How often workers have started in this folder."""
        return len(run_history.starts(self.history_file))

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Inside the block, a thread keeps showing in status.json that this process lives and how far it is, until another process writes it."""
        self._beat()

        def beat() -> None:
            with self._writing:
                if is_by_this_process(self.status_file):
                    self._beat()

        with looking(beat, every_s=self.heartbeat_s):
            yield

    def _beat(self) -> None:
        with self._writing, suppress(OSError):
            status = self._said or self.status()
            if status is not None and status.state == "running":
                self.write_status(status)

    def _saved_step(self) -> int | None:
        """Step of the newest checkpoint that ever existed; 0 for none, None if unknown."""
        known = read_saved_step(self.status_file)
        return 0 if known is None and not self.metrics() else known

    # notes for the user

    def note(self, text: str) -> None:
        """Print a note on stderr, and keep it for the process that started this one: a worker's stderr is a file."""
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError), self.notes_file.open("a") as file:
            file.write(text + "\n")

    def forget_notes(self) -> None:
        """Delete the notes, once they have been read. Those that stay are not shown again."""
        with suppress(OSError):
            self.notes_file.unlink()

    # metrics.jsonl

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append one step's line to metrics.jsonl. Notes that the file is gone if it held lines of earlier steps."""
        is_gone = self.step > 0 and not self.metrics_file.exists()
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if is_gone:
            self.note(
                f"{self.metrics_file} is gone, and with it the lines of the steps before {record['step']}; it begins again"
            )
        self.step = record["step"]

    def metrics(self) -> list[dict[str, Any]]:
        """The records of the steps written so far, without damaged lines and the half line that a killed run leaves."""
        return read_metrics(self.metrics_file)

    def truncate_metrics(self, step: int) -> int:
        """Remove from metrics.jsonl the lines after ``step``, whose steps will be computed again, repeated steps, and lines that are no
        step's record. Removed lines are kept in ``cut_metrics_file``. Returns how many of the steps up to ``step`` have a line."""
        lines = self.metrics_file.read_bytes().splitlines() if self.metrics_file.exists() else []
        self.step = step
        kept: dict[int, bytes] = {}
        cut: list[bytes] = []
        for line in lines:
            record = read_record(line)
            if record is None or record["step"] > step or record["step"] in kept:
                cut.append(line)
            else:
                kept[record["step"]] = line
        if cut:
            with self.cut_metrics_file.open("ab") as file:
                file.writelines(line + b"\n" for line in cut)
            write_aside(self.metrics_file, b"".join(line + b"\n" for line in kept.values()))
        return len(kept)

    # checkpoints

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first. Half-written ones and those that have lost a file are left out."""
        found = []
        for path in self.checkpoints_folder.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdecimal() and _fault(path) is None:
                found.append(Checkpoint(int(number), path))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def incomplete(self) -> dict[str, str]:
        """What is wrong with each incomplete checkpoint (a file is missing, cut or unreadable), keyed by the folder's name."""
        found = (path for path in self.checkpoints_folder.glob("step-*") if path.name.removeprefix("step-").isdecimal())
        return {path.name: fault for path in sorted(found) if (fault := _fault(path)) is not None}

    def refuse_lost_checkpoints(self) -> None:
        """Raises BadInput if the run has lost all of its checkpoints: a start would begin at step 0 and lose the run.

        A run that was stopped before its first checkpoint has lost none.
        """
        if self.checkpoints():
            return
        damaged = sorted(path.name for path in self.checkpoints_folder.glob("step-*.damaged"))
        faults = [*damaged, *(f"{name}: {fault}" for name, fault in self.incomplete().items())]
        saved = self._saved_step()
        if saved is None:
            faults.append(
                f"metrics.jsonl has {len(self.metrics())} steps, and status.json does not say that there was none"
            )
        elif saved:
            faults.append(f"status.json says that there was one of step {saved}")
        if faults:
            raise BadInput(
                f"run.folder = {str(self.path)!r}: no checkpoint of the run is whole ({'; '.join(faults)}), and training does not begin again "
                f"over what it has left. Put a whole copy of one into {self.checkpoints_folder}, start anew with another --run.folder, or "
                "delete this folder"
            )

    def put_away(self, checkpoint: Checkpoint) -> Path:
        """Rename a damaged checkpoint so that it no longer counts; its files stay for inspection."""
        place = checkpoint.path.with_name(checkpoint.path.name + ".damaged")
        shutil.rmtree(place, ignore_errors=True)
        checkpoint.path.rename(place)
        return place

    def aside_for(self, step: int) -> Path:
        """The folder in which this start writes the checkpoint of ``step`` until it is complete."""
        return self.checkpoints_folder / f"step-{step}.{self.start}.tmp"

    def open_checkpoint(self, step: int) -> Path:
        """An empty folder for the checkpoint of ``step``; ``commit_checkpoint`` makes it count."""
        aside = self._empty_place_aside(step)
        aside.mkdir(parents=True)
        return aside

    def _empty_place_aside(self, step: int) -> Path:
        aside = self.aside_for(step)
        _remove(aside, ignore_errors=True)
        return aside

    def commit_checkpoint(self, step: int, meta: dict[str, Any], keep: int) -> Checkpoint:
        """Flush the files of the open checkpoint to the disk, rename its folder, then remove all but the ``keep`` newest checkpoints.

        ``meta`` goes into meta.json; its key ``crc32`` holds the checksums of the files, keyed by name.
        """
        aside = self.aside_for(step)
        files = {str(f.relative_to(aside)): f.stat().st_size for f in sorted(aside.rglob("*")) if f.is_file()}
        described = json.loads(json.dumps({"step": step, **meta, "files": files}))  # with keys as they are read back
        text = json.dumps({**described, OWN_CHECKSUM: _checksum(described)}, indent=1) + "\n"
        (aside / "meta.json").write_text(text)
        for file in [*aside.rglob("*"), aside]:
            flush(file)
        final = self.checkpoints_folder / f"step-{step}"
        _remove(final, ignore_errors=True)
        aside.rename(final)
        flush(self.checkpoints_folder)
        self.keep_newest(keep)
        return Checkpoint(step, final)

    def keep_newest(self, keep: int) -> None:
        """Remove all but the ``keep`` newest complete checkpoints."""
        for old in self.checkpoints()[:-keep]:
            # Rename it first: if a kill left it half removed, nobody would know that it was meant to go.
            aside = self._empty_place_aside(old.step)
            old.path.rename(aside)
            _remove(aside)

    def discard_unfinished(self) -> None:
        """Remove whatever was being written, or removed, when a run stopped."""
        for aside in [*self.checkpoints_folder.glob("step-*.tmp"), *self.path.glob("hf.tmp*")]:
            _remove(aside, ignore_errors=True)

    # the job

    def finished(self, job: Job) -> Status | None:
        """The status of a run that has made all of the job's steps and has the weights of the last; None if anything is left to do."""
        status = self.status()
        made = {self.exported_step(), *(checkpoint.step for checkpoint in self.checkpoints())}
        whole = status is not None and status.state == "done" and status.step == job.steps and job.steps in made
        return status if whole else None

    def exported_step(self) -> int | None:
        """The step that the weights in ``weights_folder`` come from; None if there are none."""
        return export_mark.step_of(self.weights_folder)

    def has_whole_weights(self, since: int = 0) -> bool:
        """Whether no file of the exported weights is damaged; else they are put away, so that they are written again. Raises BadInput if there
        is no checkpoint of step ``since`` or later to write them from."""
        damaged = export_mark.damaged_file(self.weights_folder)
        if damaged is None:
            return True
        said = f"{self.weights_folder / damaged} is missing or has changed since it was written"
        if not any(checkpoint.step >= since for checkpoint in self.checkpoints()):
            raise BadInput(f"{said}, and no checkpoint is left to write it from; put the file back")
        place = self.weights_folder.with_name("hf.damaged")
        _remove(place, ignore_errors=True)
        self.weights_folder.rename(place)
        self.note(f"{said}; the weights are put away as {place} and written again")
        return False


def _fault(path: Path) -> str | None:
    """Why a checkpoint does not count; None if every file has its full size and meta.json has all that a start compares."""
    try:
        meta = json.loads((path / "meta.json").read_bytes())
    except OSError:
        return "meta.json is missing"
    except (ValueError, RecursionError):
        return "meta.json is no JSON"
    kinds = {"step": int, "files": dict, "crc32": dict, "job": dict, "model": str | dict}
    if not isinstance(meta, dict) or not all(isinstance(meta.get(key), kind) for key, kind in kinds.items()):
        return f"meta.json lacks one of {', '.join(kinds)}"
    if OWN_CHECKSUM in meta and meta.pop(OWN_CHECKSUM) != _checksum(meta):
        return "meta.json has changed since it was written"
    if f"step-{meta['step']}" != path.name:  # a copy, or renamed: its weights would get the batches of other steps
        return f"meta.json is of step {meta['step']}"
    for name, size in meta["files"].items():
        try:
            if (path / name).stat().st_size != size:
                return f"{name} is cut"
        except OSError:
            return f"{name} is missing"
    return None if meta["files"].keys() <= meta["crc32"].keys() else "meta.json lacks the checksum of a file"


def _checksum(meta: dict[str, Any]) -> int:
    """Of the content of meta.json."""
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _remove(place: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder; of a folder that the user has put elsewhere only the link."""
    if place.is_symlink():
        place.unlink(missing_ok=ignore_errors)
    else:
        shutil.rmtree(place, ignore_errors=ignore_errors)


def _lock(file: IO[str], until_s: float) -> None:
    """Take a lock, waiting until ``until_s`` of ``time.monotonic``. Raises BlockingIOError if another process still has it then."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
        time.sleep(LOOK_S)
