"""A probed cluster in lines for people."""

from __future__ import annotations

from ahp.cluster.catalogue import CPU
from ahp.cluster.model import Cluster, Device, Measurements, NodeGroup
from ahp.words import flops_per_s, gib


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
