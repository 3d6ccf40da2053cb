"""A run of ``ahp train`` that is disturbed: started, watched from outside through its files, and started again by the same command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml
from namespaces import Host

from ahp import run_history
from ahp.run_files import read_metrics, read_status
from ahp.run_history import Start

CLUSTER = "cluster.yaml"
"""File beside the folders of all runs: each start would measure a copy for it, a second of processor time."""
EVERY = 5
"""Steps between checkpoints: so few that some failures come while one is written."""
PATIENCE_S = 240.0
"""[Empirical] Far more than any start takes on a busy machine: past it a run does not go on by itself."""
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


Curve = Sequence[tuple[float, float]]
"""Loss and gradient norm of the steps, from the first."""
ENDLESS = 1_000_000
"""Steps of a run that is stopped."""


@dataclass(frozen=True)
class Layout:
    """What is trained, and how it is split over two workers."""

    name: str
    degrees: dict[str, Any]
    model: dict[str, Any] | str = field(default_factory=lambda: LLAMA)


LAYOUTS = (
    Layout("replicas", {"data_parallel_replicate_degree": 2}),
    Layout("ZeRO-3", {"data_parallel_shard_degree": 2, "zero_stage": 3}),
    Layout("tensor parallel", {"tensor_parallel_degree": 2}),
    Layout("pipeline", {"pipeline_parallel_degree": 2, "micro_batch_size": 2}),
    Layout("uneven pipeline", {"pipeline_parallel_degree": 2, "micro_batch_size": 2, "layers_per_stage": [1, 3]}),
    Layout("expert parallel", {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "zero_stage": 3}, MIXTRAL),
)
TWO_HOSTS = Layout("two hosts", {})
"""Planned for the workers that are there."""


class DoesNotGoOn(Exception):
    """A run that made no further step within the patience, or that ended where it should not."""


class Stopped(Exception):
    """Somebody has asked for the end of all runs."""


@dataclass
class Launch:
    """One process of ``ahp train``: the only one of a run, or that of a host."""

    process: subprocess.Popen[bytes]
    command: Sequence[str]

    def workers(self) -> list[psutil.Process]:
        """Its worker processes, not what they have started themselves."""
        with suppress(psutil.Error):
            return [p for p in psutil.Process(self.process.pid).children() if _is_worker(p)]
        return []


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "RANK" in process.environ()
    return False


class Run:
    """The folder of a run and what is written there. ``limit_s``: ``run.collective_timeout_s``, for which a rank may be waited for; ``look_s``: between two
    looks at the run, where it is waited for; ``over``: set where somebody has asked for the end, and whatever waits for the run raises Stopped."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        text: Path,
        *,
        steps: int,
        limit_s: float,
        look_s: float,
        over: threading.Event,
        place: Path | None = None,
    ) -> None:
        self.home, self.layout, self.steps, self.look_s, self.over = folder, layout, steps, look_s, over
        self.folder = place or folder / "run"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.launches: list[Launch] = []
        self.hosts: Sequence[Host] = ()
        """Where its commands run; none = on this machine itself."""
        self.log = (folder / "output.txt").open("ab")
        self.config = folder / "config.yaml"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "model": layout.model,
                    "cluster": str(folder.parent / CLUSTER),
                    "job": {
                        "data": str(text), "steps": steps, "global_batch_size": 8, "sequence_length": 64, "precision": "fp32",
                        "optimizer": {"schedule": "constant"},
                    },
                    "parallelism": layout.degrees,
                    "run": {
                        "folder": str(self.folder), "checkpoint_every": EVERY, "sample": False, "collective_timeout_s": limit_s,
                        "elastic": {"max_restarts": 1000},
                    },
                }
            )
        )  # fmt: skip

    def start(self, *options: str, prefix: Sequence[str] = (), environment: dict[str, str] | None = None) -> Launch:
        """The command of the run, as a supervisor starts it; ``prefix`` is put before it, such as ``ip netns exec``."""
        command = [*prefix, sys.executable, "-m", "ahp", "train", str(self.config), *options]
        given = {"TMPDIR": str(self.temporary), "AHP_CACHE": str(self.home.parent / "cache"), **(environment or {})}
        process = subprocess.Popen(
            command, cwd=self.home, env={**os.environ, **given}, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            start_new_session=True,
        )  # fmt: skip
        self.launches.append(Launch(process, command))
        return self.launches[-1]

    # what its files say

    def step(self) -> int:
        """The last one that was made."""
        metrics = self.metrics()
        return metrics[-1]["step"] if metrics else 0

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    def curve(self) -> Curve:
        """Loss and gradient norm of every step. Raises DoesNotGoOn where one is missing or there twice."""
        metrics = self.metrics()
        if [m["step"] for m in metrics] != list(range(1, len(metrics) + 1)):
            raise DoesNotGoOn(f"metrics.jsonl has other steps than 1 to {len(metrics)}")
        return [(m["loss"], m["grad_norm"]) for m in metrics]

    def starts(self) -> list[Start]:
        return run_history.starts(self.folder / "starts.jsonl")

    def checkpoint_steps(self) -> list[int]:
        """Of the checkpoints that are complete, oldest first."""
        found = (path.name.removeprefix("step-") for path in (self.folder / "checkpoints").glob("step-*"))
        return sorted(int(name) for name in found if name.isdigit())

    def is_over(self, begun: int) -> bool:
        """Whether the last of so many starts is over."""
        starts = self.starts()
        over = len(starts) > begun or (len(starts) == begun and starts[-1].ended is not None)
        return over or all(launch.process.poll() is not None for launch in self.launches)

    def is_done(self) -> bool:
        status = read_status(self.folder / "status.json")
        return status is not None and status.state == "done"

    def wait(self, seconds: float | None = None) -> None:
        """Let it go on for so long, by default until the next look. Raises Stopped."""
        if self.over.wait(self.look_s if seconds is None else seconds):
            raise Stopped

    def until(self, said: Callable[[], bool], what: str) -> float:
        """Wait; the seconds that it took. Raises DoesNotGoOn, Stopped."""
        began_s = time.monotonic()
        while not said():
            if time.monotonic() - began_s > PATIENCE_S:
                raise DoesNotGoOn(f"{what}: not within {PATIENCE_S:g} s")
            if all(launch.process.poll() is not None for launch in self.launches):
                raise DoesNotGoOn(f"{what}: the run has ended, {self.cause()}")
            self.wait()
        return time.monotonic() - began_s

    def cause(self) -> str:
        status = read_status(self.folder / "status.json")
        return "without a status" if status is None else f"{status.state}: {status.cause}"

    def ends(self) -> None:
        """Wait for its end, for as long as it makes steps."""
        while not self.is_done() and self.alive():
            self.until(partial(self._is_past, self.step()), "the end")
        for launch in self.launches:
            with suppress(subprocess.TimeoutExpired):
                launch.process.wait(60)

    def _is_past(self, step: int) -> bool:
        return self.step() > step or self.is_done() or not self.alive()

    def stop(self) -> None:
        """Let it make some more steps, save and end."""
        last = self.step() + EVERY
        self.until(lambda: self.step() > last, f"step {last}")
        for launch in self.launches:
            if launch.process.poll() is None:
                launch.process.terminate()
        for launch in self.launches:
            try:
                launch.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise DoesNotGoOn(f"it does not stop within {PATIENCE_S:g} s") from None

    # its processes

    def alive(self) -> list[psutil.Process]:
        """Every process that was started by it, orphans too: known by its folder for temporary files."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get("TMPDIR") == str(self.temporary) and process.status() != psutil.STATUS_ZOMBIE
        return False

    def kill(self) -> None:
        for process in self.alive():
            with suppress(psutil.Error):
                process.kill()
        for launch in self.launches:
            launch.process.wait()

    def close(self) -> None:
        self.kill()
        self.log.close()


def settle(process: subprocess.Popen[bytes], number: signal.Signals, timeout_s: float = 60.0) -> int:
    """Send a signal and wait for the end."""
    process.send_signal(number)
    return process.wait(timeout_s)


def left_behind(run: Run) -> list[str]:
    """After its end: processes that still run, and files that are not needed. torch's cache of compiled kernels is meant to stay."""
    found = [f"process {' '.join(process.cmdline())[:80]}" for process in run.alive()]
    found += [
        str(path.relative_to(run.home))
        for path in run.temporary.iterdir()
        if not path.name.startswith("torchinductor_")
    ]
    return found + [str(path) for path in run.folder.rglob("*.tmp")]


def deviation(curve: Curve, reference: Curve) -> float:
    """Greatest relative difference of a loss or gradient norm from those of the run that nothing disturbed; 0.0: the same digits."""
    pairs = [(a, b) for mine, theirs in zip(curve, reference, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def reference_curve(
    folder: Path, layout: Layout, text: Path, *, steps: int, limit_s: float, look_s: float, over: threading.Event
) -> Curve:
    """That of a run of so many steps that nothing disturbs."""
    place = folder / f"reference-{layout.name.replace(' ', '-')}"
    run = Run(place, layout, text, steps=steps, limit_s=limit_s, look_s=look_s, over=over)
    try:
        run.start()
        run.ends()
        if not run.is_done():
            raise DoesNotGoOn(f"the undisturbed run of {layout.name}: {run.cause()}")
        return run.curve()
    finally:
        run.close()
