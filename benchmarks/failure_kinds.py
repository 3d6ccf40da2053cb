"""What may happen to a run, done to it: each kind strikes, and lets the run go on as its supervisor would."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import namespaces
import psutil
from failure_run import DoesNotGoOn, Launch, Run, settle
from namespaces import Host, HostSpec

TMPFS_BYTES = 64_000_000
"""Of the small disk: some ten checkpoints."""


@dataclass(frozen=True)
class Kind:
    """One kind of failure."""

    name: str
    strike: Callable[[Run, random.Random], None]
    supervised: bool = False
    """The process that the user started ends with it, so the same command is started again, as Slurm, Kubernetes or a loop of a shell does."""
    damages: bool = False
    """The newest checkpoint is damaged with it, so the run goes on from the one before."""
    hosts: bool = False
    """Of one of two hosts, in network namespaces of their own."""
    small_disk: bool = False
    """The run's folder lies on a disk that is nearly full."""


def one_worker(run: Run, draw: random.Random) -> None:
    draw.choice(_workers(run)).kill()


def all_workers(run: Run, draw: random.Random) -> None:
    for worker in _workers(run):
        worker.kill()


def stopped_worker(run: Run, draw: random.Random) -> None:
    draw.choice(_workers(run)).suspend()


def launcher(run: Run, draw: random.Random) -> None:
    run.launches[-1].process.kill()
    run.launches[-1].process.wait()


def terminated(run: Run, draw: random.Random) -> None:
    code = settle(run.launches[-1].process, signal.SIGTERM)
    if code != 128 + signal.SIGTERM:
        raise DoesNotGoOn(f"SIGTERM: exit code {code}, not {128 + signal.SIGTERM}; {run.cause()}")


def full_disk(run: Run, draw: random.Random) -> None:
    """Until the run has met it; then somebody makes room."""
    begun, filler = len([s for s in run.starts() if s.ended]), run.folder / "filler"
    while not filler.exists():  # a checkpoint that is written may have taken the last of the room
        with suppress(OSError):
            filler.touch()
    with (
        filler.open("wb", buffering=0) as file,
        suppress(OSError),
    ):  # what is buffered would be written once more at the end
        while True:
            file.write(b"x" * 65536)
    try:
        run.until(lambda: len([s for s in run.starts() if s.ended]) > begun or _gone(run), "the full disk is met")
    finally:
        filler.unlink()


def _gone(run: Run) -> bool:
    return run.launches[-1].process.poll() is not None


def truncated(run: Run, draw: random.Random) -> None:
    run.kill()
    file = _newest_file(run, draw)
    os.truncate(file, file.stat().st_size // 2)


def flipped(run: Run, draw: random.Random) -> None:
    run.kill()
    file = _newest_file(run, draw)
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def host(run: Run, draw: random.Random) -> None:
    """All of its processes at once."""
    for process in draw.choice(_hosts(run)):
        with suppress(psutil.Error):
            process.kill()


def cut_network(run: Run, draw: random.Random) -> None:
    draw.choice(run.hosts).set_link(up=False)


KINDS = (
    Kind("kill -9 of one worker", one_worker),
    Kind("kill -9 of all workers", all_workers),
    Kind("SIGSTOP of one worker", stopped_worker),
    Kind("kill -9 of the launcher", launcher, supervised=True),
    Kind("SIGTERM", terminated, supervised=True),
    Kind("full disk, then room again", full_disk, small_disk=True, supervised=True),
    Kind("all killed, newest checkpoint truncated", truncated, supervised=True, damages=True),
    Kind("all killed, a bit of the newest checkpoint flipped", flipped, supervised=True, damages=True),
    Kind("a host is lost (of two)", host, hosts=True),
    Kind("network of a host cut (of two)", cut_network, hosts=True),
)


def _workers(run: Run) -> list[psutil.Process]:
    return run.launches[-1].workers()


def _hosts(run: Run) -> list[list[psutil.Process]]:
    """The processes of each launcher that lives."""
    found = []
    for launch in run.launches:
        with suppress(psutil.Error):
            process = psutil.Process(launch.process.pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append([*process.children(recursive=True), process])
    return found


def _newest_file(run: Run, draw: random.Random) -> Path:
    newest = run.folder / "checkpoints" / f"step-{run.checkpoint_steps()[-1]}"
    return draw.choice(sorted(path for path in newest.rglob("*.distcp")))


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A folder on a disk of its own."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", place], check=True)
    try:
        yield place / "run"
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def start_on(run: Run, host: Host) -> Launch:
    """The command of the run on one of its hosts."""
    places = ",".join(f"{one.address}:29500" for one in run.hosts)
    return run.start(
        "--nodes", "1:2", "--workers-per-node", "1", "--rendezvous", places, prefix=host.prefix, environment=host.environment
    )  # fmt: skip


def why_not(kind: Kind) -> str | None:
    """Why this system does not let a kind be tried, None where it does."""
    if not (kind.hosts or kind.small_disk):
        return None
    if kind.hosts:
        return namespaces.why_not([HostSpec()] * 2)
    if os.geteuid():
        return "needs root"
    return "needs the command mount" if shutil.which("mount") is None else None
