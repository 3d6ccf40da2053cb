"""This machine as ``ahp train`` knows it: measured once, and kept for every run on it."""

from __future__ import annotations

import hashlib
import json
import zlib
from importlib.metadata import version
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

from ahp.cluster import managers, sense
from ahp.cluster.gpus import gpus
from ahp.cluster.measure import DISTURBED, busy_share, is_busy, probe
from ahp.cluster.model import CLUSTER_SCHEMA_VERSION, Cluster
from ahp.cluster.parse import to_text
from ahp.errors import BadInput
from ahp.runtime.run.progress import say
from ahp.whole_files import write_aside

FORMAT = 3
"""Counted up when a probe measures something else, or in another way: older measurements are then never found."""
CHECKSUM = b"# crc32 of what follows: "
"""Begins the first line of a measurement, in which a flipped bit would be another speed, and another plan."""


def measured(workers: int | None, run_folder: Path, cache: Path) -> Cluster:
    """This machine with ``workers`` workers, None = all GPUs, else all cores; as it was measured before, or now.

    A measurement that other programs disturbed is repeated when they are gone.
    """
    count = workers or num_devices()
    file = cache / "machines" / f"{_facts_hash(count)}.yaml"
    known = _kept(file)
    if known is not None and DISTURBED in known.source and not is_busy(busy_share()):
        say(f"other programs used the processor when {file} was measured, and do not now")
        known = None
    if known is not None:
        say(f"this machine was measured before: {known.source}; delete {file} to measure it again")
        return known
    cluster = _probed(count, run_folder)
    _keep(cluster, file)
    return cluster


def num_devices() -> int:
    """Number of GPUs of this machine, else of cores."""
    return len(gpus()) or sense.physical_cores()


def _facts_hash(workers: int) -> str:
    """Hash of all that would make a measurement one of another machine, or of another way to measure."""
    facts = {
        "format": [FORMAT, CLUSTER_SCHEMA_VERSION],
        "cpu": sense.cpu_name(),
        "cores": sense.physical_cores(),
        "processors": sense.cpu_quota(),
        "memory_gib": round(sense.memory_limit_bytes() / 2**30),
        "gpus": [[gpu.name, gpu.memory_bytes] for gpu in gpus()],
        "nodes": managers.num_nodes(),
        "workers": workers,
        "torch": version("torch"),
    }
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _kept(file: Path) -> Cluster | None:
    try:
        first, _, rest = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        say(f"the machine is measured again: {file}: {error.strerror}")
        return None
    if first != _first_line(rest):
        say(f"the machine is measured again: {file} has changed since it was written")
        return None
    try:
        return Cluster.load(file)
    except BadInput as error:
        say(f"the machine is measured again: {error}")
        return None


def _keep(cluster: Cluster, file: Path) -> None:
    content = to_text(cluster).encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_aside(file, _first_line(content) + b"\n" + content)
    except OSError as error:
        say(f"the measurement is not kept for other runs: {file}: {error.strerror}")
    else:
        say(f"kept for every run on this machine: {file}")


def _first_line(content: bytes) -> bytes:
    return CHECKSUM + f"{zlib.crc32(content):08x}".encode()


def _probed(workers: int, run_folder: Path) -> Cluster:
    say("measuring this machine once, for all runs: half a minute")
    bar = Progress(BarColumn(bar_width=24), TextColumn("probing: {task.description}"), transient=True)
    bar.console.stderr = True
    with bar:
        task = bar.add_task("this machine", total=1.0)
        return probe(
            quick=True,
            workers=workers,
            progress=lambda what, share: bar.update(task, description=what, completed=share),
            folder=run_folder,
        )
