"""Starts the workers of a run on this node through torch's own launcher, and waits for them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType

import psutil

from ahp.cluster.environment import COMPUTE
from ahp.cluster.most_workers import refuse_workers
from ahp.cluster.sense import physical_cores
from ahp.runtime.ranks.ask_to_save import stopping_when
from ahp.runtime.ranks.environment import gpu_variables
from ahp.runtime.ranks.stop_signals import on_stop_signals
from ahp.runtime.ranks.stopped import ending_stopped
from ahp.runtime.ranks.watch import Watch, watching

SECONDS_BETWEEN_POLLS = 0.1
"""The launcher's own default (torch.distributed.launcher.api.LaunchConfig.monitor_interval)."""
SAME_MOMENT_S = 10
"""Workers that end within this time of the first failure were not ended by the launcher, which waits 30 s before it kills
(TORCH_ELASTIC_SHUTDOWN_TIMEOUT)."""
LAST_LINES = 5
"""How many lines of each worker's log are shown: the end of a traceback."""
SECOND_SIGNAL_S = 1.0
"""[Empirical] Signals closer together than this are one request, sent to a group of processes and passed on."""


class WorkersEnded(Exception):
    """Not every worker ended well. ``exit_codes``: of the workers that ended first, keyed by rank; minus the signal's number if killed.
    ``hang``: the cause, if the launcher ended workers because they hung."""

    def __init__(self, exit_codes: dict[int, int], hang: str | None = None) -> None:
        super().__init__(f"workers ended with {exit_codes}")
        self.exit_codes, self.hang = exit_codes, hang

    @property
    def killed(self) -> dict[int, signal.Signals]:
        """The signal that killed each rank, except SIGTERM, with which the launcher ends the others."""
        ours = -signal.SIGTERM
        return {rank: signal.Signals(-code) for rank, code in self.exit_codes.items() if code < 0 and code != ours}


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    num_workers: int,
    log_folder: Path,
    watch: Watch | None = None,
    stops_when: Callable[[], bool] | None = None,
) -> int:
    """Run ``python -m module arguments`` as ranks 0 .. num_workers - 1 on this node until all have ended.

    Their output goes to files under ``log_folder``. ``watch``: when workers hang, and are ended. ``stops_when``: whether workers are to save
    and stop without a signal to this process. SIGINT, SIGTERM and SIGUSR1 are passed on as SIGTERM to the workers, which end when they have
    saved; a second signal kills them.

    Returns:
        The signal that asked for the stop, 0 for none.

    Raises:
        BadInput: more workers than this machine carries.
        WorkersEnded: a worker exited with an error or was killed.
    """
    refuse_workers(f"workers = {num_workers}", num_workers)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from ahp.runtime.ranks import rendezvous

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=f"start-{int(time.time())}",
        rdzv_backend=rendezvous.register(),
        local_addr=rendezvous.LOOPBACK,
        max_restarts=0,
        monitor_interval=SECONDS_BETWEEN_POLLS,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_folder), redirects=Std.ALL),
        # Our handlers are set below; the launcher's would kill the workers 30 s after the signal, saved or not.
        signals_to_handle="SIGQUIT",
    )
    with (
        quiet_launcher(),
        _environment(num_workers, log_folder),
        _forwarding_signals(module) as wish,
        watching(watch, lambda: workers_of(module), num_workers) as hang,
        stopping_when(stops_when, lambda: workers_of(module)),
        ending_stopped(lambda: workers_of(module), watch.stopped_s if watch is not None else None) as stopped,
    ):
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except KeyboardInterrupt:
            if not wish.number:
                raise
        except ChildFailedError as error:
            if wish.number:
                return wish.number
            raise _ended(error, stopped.cause or hang.cause) from None
    return wish.number


def _ended(error: Exception, hang: str | None) -> WorkersEnded:
    failures = getattr(error, "failures", {})
    first = min(f.timestamp for f in failures.values())
    codes = {rank: f.exitcode for rank, f in failures.items() if f.timestamp <= first + SAME_MOMENT_S}
    return WorkersEnded(codes, hang)


@dataclass
class _StopSignal:
    number: int = 0
    came_s: float = 0.0


@contextmanager
def _forwarding_signals(module: str) -> Iterator[_StopSignal]:
    wish = _StopSignal()

    def pass_on(number: int, frame: FrameType | None) -> None:
        again = wish.number and time.monotonic() - wish.came_s > SECOND_SIGNAL_S
        if not wish.number:
            wish.number, wish.came_s = number, time.monotonic()
        workers = workers_of(module)
        for worker in workers:
            worker.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        if not workers:
            raise KeyboardInterrupt

    with on_stop_signals(pass_on):
        yield wish


def last_words(log_folder: Path) -> str:
    """The last lines that each worker of the newest start wrote to stderr, for an error with no other explanation."""
    folders = [path for path in log_folder.glob("*") if path.is_dir()]
    newest = max(folders, key=lambda path: path.stat().st_mtime, default=log_folder)
    logs = sorted(newest.rglob("stderr.log"))
    lines = (line for log in logs for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    return "\n".join(lines) or "they left no message"


def workers_of(module: str) -> list[psutil.Process]:
    """The children of this process that run ``python -m module``."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if ("-m", module) in pairwise(child.cmdline()):
                found.append(child)
    return found


@contextmanager
def _environment(num_workers: int, log_folder: Path) -> Iterator[None]:
    """Variables that the workers inherit; what the user has set stays."""
    ours = {"OMP_NUM_THREADS": str(max(1, physical_cores() // num_workers)), **COMPUTE}
    if Path("/sys/class/net/lo").exists():
        # All ranks are on this node: gloo need not look up the machine's name, which may not resolve.
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    ours |= gpu_variables(os.environ, log_folder)
    added = {key: value for key, value in ours.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


@contextmanager
def quiet_launcher() -> Iterator[None]:
    """Silences torch's launcher, which logs tables about failures; the user gets the cause instead."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
