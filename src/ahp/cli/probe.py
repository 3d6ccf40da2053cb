"""``ahp probe``: sense and measure this machine, or several hosts at once, and write cluster.yaml."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ahp.cli.options import options_of
from ahp.cli.writable import require_writable
from ahp.cluster.catalogue import CPU
from ahp.cluster.model import Cluster, Device, Measurements, NodeGroup
from ahp.optional import Flag, OptionalFigure, OptionalNumber, OptionalText
from ahp.words import flops_per_s, gib


@dataclass
class Arguments:
    """Sense and measure this machine: processors, memory, disk, products, streams and collectives.

    For several hosts, run the same command on each: under torchrun, under srun, or with --nodes and --rendezvous. Each host measures itself, pairs
    of hosts measure their link, and the first writes one file."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("cluster.yaml")
    """File to write."""
    quick: Flag = False
    """Fewer shapes and sizes: well under a minute instead of up to three."""
    workers: OptionalNumber = None
    """Devices to measure and to have; by default all GPUs, else all physical cores."""
    inter_node_gbps: OptionalFigure = None
    """Network of one node in a job of several, Gb/s per direction; by default the usual figure, or what the cards report."""
    nodes: Annotated[OptionalNumber, tyro.conf.arg(metavar="N")] = None
    """Hosts that run this command together; under srun the hosts of the step."""
    rendezvous: Annotated[OptionalText, tyro.conf.arg(metavar="HOST[:PORT]")] = None
    """An address of one of the hosts, the same on all: that host writes the file. The port is 29500 if none is given."""
    json: Flag = False
    """Print the cluster as JSON instead of tables."""


def run(argv: list[str]) -> int:
    """Parse, probe, write, print. Returns the exit code."""
    arguments = options_of(Arguments, argv, "ahp probe")
    from ahp.cli import probe_hosts

    if (place := probe_hosts.place(arguments.nodes, arguments.rendezvous)) is not None:
        return probe_hosts.run(arguments, place)
    require_writable(arguments.output)
    from ahp.cluster.measure import probe

    folder = arguments.output.parent
    with progress_bar() as say:
        cluster = probe(
            quick=arguments.quick,
            workers=arguments.workers,
            progress=say,
            folder=folder,
            inter_node_gbps=arguments.inter_node_gbps,
        )
    cluster.save(arguments.output)
    if arguments.json:
        print(json.dumps(cluster.plain()))
        return 0
    print("\n".join(lines(cluster)))
    print(f"\nWrote {arguments.output}")
    print(f"Next: ahp plan tiny {shlex.quote(str(arguments.output))}")
    return 0


def lines(cluster: Cluster) -> list[str]:
    """A probed cluster of one group, in lines for people."""
    (group,) = cluster.groups
    measured = group.measured or Measurements()
    return [
        *machine(group),
        "",
        *_products(measured),
        "",
        *_streams(measured),
        *_collectives(measured),
        "",
        cluster.source,
    ]


def machine(group: NodeGroup) -> list[str]:
    """A node and its devices."""
    host, device = group.host, group.device
    disk = [host.storage_kind or "unknown"]
    if host.storage_free_bytes is not None:
        disk.append(f"{gib(host.storage_free_bytes)} free")
    if host.storage_write_bytes_per_s is not None:
        disk.append(f"writes {host.storage_write_bytes_per_s / 1e6:.0f} MB/s")
    if host.storage_read_bytes_per_s is not None:
        disk.append(f"reads {host.storage_read_bytes_per_s / 1e6:.0f} MB/s")
    peaks = ", ".join(f"{name} {flops_per_s(peak)}" for name, peak in device.peak_flops_per_s.items())
    memory = f", {gib(host.memory_bytes)}" if host.memory_bytes is not None else ""
    granted = f", {host.processors:g} of their time" if host.processors is not None else ""
    return [
        f"processor  {host.cpu}, {host.cores} physical cores{granted}{memory}",
        f"devices    {group.devices_per_node} x {device.name}, {gib(device.memory_bytes)} each; {peaks}",
        f"link       {group.intra_node.bandwidth_bytes_per_s / 1e9:.2f} GB/s, {group.intra_node.latency_s * 1e6:.0f} us",
        f"launch     {device.kernel_launch_s * 1e6:.1f} us, {_smallest(device)}",
        f"storage    {', '.join(disk)}",
    ]


def _smallest(device: Device) -> str:
    """What a launch was timed on: see Device.kernel_launch_s."""
    if device.name == CPU:
        return "an operator of a training step with next to no work: Python, dispatch, autograd"
    return "the smallest kernel"


def _products(measured: Measurements) -> list[str]:
    """Best rate of the matrix products by dtype, one column per number of workers at once."""
    counts = sorted({sample.workers for sample in measured.matmul})
    found = [f"{'per worker, while so many workers run':<34}" + "".join(f"{count:>16}" for count in counts)]
    for dtype in dict.fromkeys(sample.dtype for sample in measured.matmul):
        cells = []
        for count in counts:
            samples = [s for s in measured.matmul if s.dtype == dtype and s.workers == count]
            cells.append(flops_per_s(max(2.0 * s.m * s.n * s.k / s.seconds for s in samples)) if samples else "-")
        found.append(f"{'best product, ' + dtype:<34}" + "".join(f"{cell:>16}" for cell in cells))
    return found


def _streams(measured: Measurements) -> list[str]:
    cells = [f"{sample.bytes_per_s / 1e9:.1f} GB/s" for sample in measured.memory]
    return [f"{'memory stream':<34}" + "".join(f"{cell:>16}" for cell in cells)]


def _collectives(measured: Measurements) -> list[str]:
    """Time by size for the largest group."""
    if not measured.collectives:
        return []
    count = max(sample.workers for sample in measured.collectives)
    samples = [sample for sample in measured.collectives if sample.workers == count]
    sizes = sorted({sample.bytes for sample in samples})
    found = ["", f"{f'collective over {count} workers':<34}" + "".join(f"{_size(size):>10}" for size in sizes)]
    for kind in dict.fromkeys(sample.kind for sample in samples):
        times = {sample.bytes: f"{sample.seconds * 1e3:.2f} ms" for sample in samples if sample.kind == kind}
        found.append(f"{kind:<34}" + "".join(f"{times.get(size, '-'):>10}" for size in sizes))
    return found


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.0f} KiB"


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr; nothing moves if stderr is not a terminal."""
    columns = (
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
