"""Trackers in addition to metrics.jsonl: TensorBoard and Weights & Biases (extra [track])."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ahp.about import install_extra
from ahp.errors import bad_input, first_line
from ahp.plan import Plan

NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""The module that each tracker needs."""


class Tracker(Protocol):
    """Receives the figures of each step."""

    def log(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``tensorboard/`` of the run's folder; ``tensorboard --logdir FOLDER`` shows them."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps that an earlier start wrote after its checkpoint are computed again, so they are not shown.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, record: dict[str, Any]) -> None:
        for key, value in _figures(record).items():
            self.writer.add_scalar(key, value, record["step"])
        # TensorFlow, if installed, can buffer steps for 120 s: a killed run continues from a checkpoint and would lose buffered steps before it.
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """One run of the project ``ahp``, the same one when a folder's run continues. WANDB_MODE=offline keeps it on this machine.

    W&B ignores a step that is not above the last one: steps that are computed again keep their first values (docs/train/run-folder.md).
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        identity = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
        config = plan.model_dump(mode="json", include={"model", "init_from", "job", "parallelism", "versions"})
        self.run = wandb.init(
            project="ahp", name=folder.name, dir=str(folder), id=identity, resume="allow", config=config
        )

    def log(self, record: dict[str, Any]) -> None:
        self.run.log(_figures(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()


def check(names: Sequence[str]) -> None:
    """Refuse, before a worker starts, a tracker that is not installed, or Weights & Biases without a login."""
    for name in names:
        if name not in NEEDS:
            raise bad_input("run.track", list(names), f"{name} is no tracker", NEEDS)
        if importlib.util.find_spec(NEEDS[name]) is None:
            raise bad_input("run.track", list(names), f"{name} is not installed; {install_extra('track')}")
    if "tensorboard" in names and os.environ.get("RANK", "0") == "0":
        _refuse_what_does_not_import(names)
    if "wandb" in names and os.environ.get("RANK", "0") == "0":  # the rank that logs
        _refuse_without_login(names)


def _refuse_what_does_not_import(names: Sequence[str]) -> None:
    """Raises BadInput for a TensorBoard that is installed, but not usable: its own packages raise errors of many kinds."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except Exception as error:
        rule = f"tensorboard cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise bad_input("run.track", list(names), rule) from None


def _refuse_without_login(names: Sequence[str]) -> None:
    import wandb  # pyright: ignore[reportMissingImports]

    try:
        wandb.login()  # asks for a key on a terminal; offline it needs none
    except wandb.Error as error:
        rule = f"wandb: {first_line(error)}"
        raise bad_input("run.track", list(names), rule, ("WANDB_MODE=offline", "the command wandb login")) from None


class Trackers:
    """The trackers of a run. They start with the first record, so that they know from which step the run continues.

    A tracker that fails (a full disk, a service that does not answer) is left out for the rest of this start: metrics.jsonl has every figure.
    """

    def __init__(self, names: Sequence[str], folder: Path, plan: Plan, note: Callable[[str], None]) -> None:
        """``note``: tells the user something."""
        self.names, self.folder, self.plan, self.note = tuple(dict.fromkeys(names)), folder, plan, note
        self.started: dict[str, Tracker] | None = None

    def log(self, record: dict[str, Any]) -> None:
        """Pass on one step's record of metrics.jsonl."""
        if self.started is None:
            self.started = {}
            for name in self.names:
                with self._going_on_without(name):
                    self.started[name] = self._start(name, record["step"])
        for name, tracker in list(self.started.items()):
            with self._going_on_without(name):
                tracker.log(record)

    def close(self) -> None:
        for name, tracker in list((self.started or {}).items()):
            with self._going_on_without(name):
                tracker.close()

    @contextmanager
    def _going_on_without(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            (self.started or {}).pop(name, None)
            reason = f"{type(error).__name__}: {first_line(error)}"
            self.note(
                f"run.track: {name} failed, and the run goes on without it ({reason}); metrics.jsonl has every figure"
            )

    def _start(self, name: str, first_step: int) -> Tracker:
        return (
            TensorBoard(self.folder, first_step) if name == "tensorboard" else WeightsAndBiases(self.folder, self.plan)
        )


def _figures(record: dict[str, Any]) -> dict[str, float]:
    """The record without its step, and without values that this step lacks."""
    return {key: float(value) for key, value in record.items() if key != "step" and value is not None}
