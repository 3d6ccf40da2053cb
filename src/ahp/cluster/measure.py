"""``probe``: measures this machine with the products, streams and collectives that training consists of."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ahp.cluster import catalogue, disk, local, managers, sense, team
from ahp.cluster.domains import domain_of
from ahp.cluster.gpus import Gpu, gpus, topology
from ahp.cluster.model import (
    AttentionSample,
    Cluster,
    CollectiveSample,
    Device,
    ElementWiseSample,
    Host,
    Link,
    MatmulSample,
    Measurements,
    MemorySample,
    NodeGroup,
)
from ahp.cluster.most_workers import refuse_workers
from ahp.cluster.tasks import COLLECTIVES, Task, tasks
from ahp.errors import AhpError, BadInput, bad_input, whole_number

Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is finished, 0 to 1."""


@dataclass(frozen=True)
class Pace:
    """How long to measure: all tasks together, the slowest task, and the size of the file for the disk.

    The list of tasks is run ``rounds`` times and the median of a task's figures counts: what another program does to the
    machine for a moment spoils one round, not the figure. The best figure would be that of the machine's best moment, but
    a run meets its usual ones.
    """

    total_s: float
    """From the start of the workers: enough time if the machine does nothing else, a limit if it does."""
    rounds: int
    slowest_s: float
    disk_bytes: int


QUICK = Pace(total_s=24.0, rounds=3, slowest_s=0.8, disk_bytes=64 * 2**20)
FULL = Pace(total_s=130.0, rounds=3, slowest_s=3.0, disk_bytes=512 * 2**20)
BUSY_SHARE, BUSY_SAMPLE_S = 0.1, 0.5
"""Other programs are mentioned if they use more than this share of the processor; how long this is watched."""

DISTURBED = "other programs used"
"""Part of the source of a cluster that was measured while other programs ran."""

STREAM_CACHES = 4
"""Size of a streamed tensor in last-level caches, so that the cache cannot hold it."""
STREAM_CPU_BYTES = 128 * 2**20
"""Size of a streamed tensor if the cache size is unknown."""
COLD_CACHES = 2
"""Operands of successive calls are spread over this many last-level caches, so that each call finds its own outside the
cache, as an operator does in a training step. On a GPU they lie where the previous call left them: its tables begin at
sizes near its caches'."""
STREAM_CUDA_BYTES = 2**30
"""Far above the largest on-chip cache of any GPU (B200: 126 MiB)."""


def probe(
    *,
    quick: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    folder: str | Path = ".",
    inter_node_gbps: float | None = None,
    num_nodes: int | None = None,
) -> Cluster:
    """Sense and measure this machine, or this node of the Slurm or Kubernetes job that it is part of.

    With GPUs a device is a GPU, and NCCL is measured. Without, a device is one worker process with its share of the
    physical cores and of the memory, and gloo is measured. Samples are medians of several calls after a warm-up.

    Args:
        quick: fewer shapes and sizes; under 40 s on two cores instead of under 3 minutes.
        workers: devices to measure and to have; default: all GPUs, else all physical cores.
        progress: called as the work goes on.
        folder: where runs will be written; its storage is measured.
        inter_node_gbps: network of one node, Gb/s per direction, in a job of several nodes; default: what is usual
            for the GPU, else what the node's cards say. It is not measured, and all nodes are taken to be like this.
        num_nodes: nodes that are like this one; default: those of the job that a workload manager has started.

    Raises:
        BadInput: an impossible number of workers.
        AhpError: a worker fails.

    Example::

        cluster = ahp.probe(quick=True)
        cluster.save("cluster.yaml")
    """
    workers = None if workers is None else whole_number("workers", workers, 1)
    num_nodes = None if num_nodes is None else whole_number("num_nodes", num_nodes, 1)
    say = progress or (lambda _what, _share: None)
    pace = QUICK if quick else FULL
    say("sensing", 0.0)
    busy = busy_share()
    found, host = gpus(), sense.host(folder)
    limit = len(found) if found else None
    count = workers if workers is not None else (limit or host.cores or 1)
    if count < 1 or (limit is not None and count > limit):
        rule = "must be at least 1" if limit is None else f"must be between 1 and the {limit} GPUs that are visible"
        raise bad_input("workers", count, rule)
    if not found:
        refuse_workers(f"workers = {count}", count)
    nodes = num_nodes or managers.num_nodes()
    network = _network(nodes, found, count, host, inter_node_gbps)
    available = sense.memory_available_bytes()
    say("disk", 0.0)
    written, read = disk.throughput(host.storage_path or ".", pace.disk_bytes)
    host = host.model_copy(update={"storage_write_bytes_per_s": written, "storage_read_bytes_per_s": read})
    plan = tasks(workers=count, on_cuda=bool(found), quick=quick)
    facts, values = _measure(plan, count, host, bool(found), available, pace, say)
    source = f"probe on {platform.node()}, {datetime.date.today()}, torch {facts['torch']}"
    if is_busy(busy):
        source += f"; {DISTURBED} {busy:.0%} of the processor, so times are too long"
    measured = _tables(plan, values)
    if found:
        group = _gpu_group(found, measured, _launch(plan, values), source)
    else:
        group = _cpu_group(host, measured, _launch(plan, values), available // count, facts["rss_bytes"], source)
    around = {"nodes": nodes, "inter_node": network, "devices_per_node": count, "host": host, "measured": measured}
    device = group.device.name
    nvlink = {"nvlink_switch": local.nvlink_switch(device, found[:count]), **domain_of(device, nodes, count)}
    group = group.model_copy(update={**around, **nvlink})
    say("done", 1.0)
    return Cluster(groups=(group,), source=source)


def busy_share() -> float:
    """Share of the processor that other programs use now, while this one waits."""
    return psutil.cpu_percent(interval=BUSY_SAMPLE_S) / 100


def is_busy(share: float) -> bool:
    """Whether other programs use so much of the processor that measurements are not the machine's own."""
    return share > BUSY_SHARE


def _network(nodes: int, found: list[Gpu], count: int, host: Host, given_gbps: float | None) -> Link | None:
    """The network between the nodes of a job, as far as it is known without measuring; None for a single node."""
    if given_gbps is not None and not 0 < given_gbps < float("inf"):
        raise bad_input("inter_node_gbps", given_gbps, "must be above 0")
    if nodes == 1:
        return None
    known = catalogue.match(found[0].name, found[0].memory_bytes) if found else None
    kind = sense.network_kind() if found else None  # gloo goes through sockets
    if known is not None and given_gbps is None and (usual := known.inter_node(count)) is not None:
        return catalogue.with_network(usual, kind) if kind else usual
    any_gpu = known or catalogue.find("A100")
    gbps, source = (
        (given_gbps, "given by the user") if given_gbps is not None else (host.network_gbps, "the node's cards")
    )
    if gbps is None:
        raise BadInput(
            f"inter_node_gbps is missing: this job has {nodes} nodes, and neither the catalogue nor this node's cards say "
            "how fast their network is; give the Gb/s of one node per direction"
        )
    network = any_gpu.network(gbps, f"{source}, not measured; latency: {any_gpu.network_source.split('latency: ')[-1]}")
    return network if known and not kind else catalogue.with_network(network, kind or catalogue.UNNAMED_NETWORK)


def _measure(
    plan: list[Task], count: int, host: Host, on_cuda: bool, available: int, pace: Pace, say: Progress
) -> tuple[dict[str, Any], list[float | None]]:
    """What rank 0 reports about itself, and the value of every task (None = left out because it is too slow)."""
    cache = sense.last_level_cache_bytes()
    stream = STREAM_CUDA_BYTES if on_cuda else STREAM_CACHES * cache if cache else STREAM_CPU_BYTES
    cold = 0 if on_cuda else COLD_CACHES * (cache or STREAM_CPU_BYTES // STREAM_CACHES)
    settings = {
        "workers": count,
        "cores": (cores := host.cores or 1),
        "processors": min(cores, host.processors or cores),
        "device": "cuda" if on_cuda else "cpu",
        "deadline": time.time() + pace.total_s,
        "rounds": pace.rounds,
        "slowest_s": pace.slowest_s,
        # Two tensors for each worker must fit next to everything else.
        "stream_bytes": stream if on_cuda else min(stream, available // (8 * count)),
        # Operands of each dtype for each worker.
        "cold_bytes": min(cold, available // (8 * count)),
        "tasks": [task.plain() for task in plan],
    }
    say("starting workers", 0.0)
    facts: dict[str, Any] = {}
    found: list[list[float]] = [[] for _ in plan]
    done = 0
    for line in team.results(settings):
        if "task" not in line:
            facts = line
            continue
        index = line["task"]
        if line["value"] is not None:
            found[index].append(line["value"])
        done += 1
        say(plan[done % len(plan)].words(), done / (len(plan) * pace.rounds))
    if not facts:
        raise AhpError("probe: the workers ended without an error message")
    return facts, [statistics.median(values) if values else None for values in found]


def _tables(plan: list[Task], values: list[float | None]) -> Measurements:
    known = [(task, value) for task, value in zip(plan, values, strict=True) if value is not None]
    return Measurements(
        matmul=tuple(
            MatmulSample(phase=t.phase, m=t.m, n=t.n, k=t.k, dtype=t.dtype, workers=t.workers, seconds=value)
            for t, value in known
            if t.kind == "matmul"
        ),
        memory=tuple(MemorySample(workers=t.workers, bytes_per_s=value) for t, value in known if t.kind == "memory"),
        attention=tuple(
            AttentionSample(
                heads=t.heads,
                sequence=t.m,
                head_dim=t.k,
                dtype=t.dtype,
                workers=t.workers,
                phase="backward" if t.kind == "attention_backward" else "forward",
                seconds=value,
            )
            for t, value in known
            if t.heads
        ),
        element_wise=tuple(
            ElementWiseSample(
                kind="silu" if t.kind == "silu" else "add",
                elements=t.elements,
                dtype=t.dtype,
                workers=t.workers,
                seconds=value,
            )
            for t, value in known
            if t.elements
        ),
        collectives=tuple(
            CollectiveSample(kind=t.kind, workers=t.workers, bytes=t.bytes, seconds=value)  # pyright: ignore[reportArgumentType]
            for t, value in known
            if t.kind in COLLECTIVES
        ),
    )


def _launch(plan: list[Task], values: list[float | None]) -> float:
    return next(value for task, value in zip(plan, values, strict=True) if task.kind == "launch" and value is not None)


def _cpu_group(
    host: Host, measured: Measurements, launch_s: float, memory_bytes: int, rss_bytes: int, source: str
) -> NodeGroup:
    device = Device(
        name=catalogue.CPU,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=_bandwidth(measured),
        peak_flops_per_s=_peaks(measured),
        kernel_launch_s=launch_s,
        reserved_memory_bytes=rss_bytes,
        source=f"{source}: {host.cpu}; the peak is the fastest product measured while all workers compute",
    )
    link = measured_link(measured, source) or local.cpu_group().intra_node
    return NodeGroup(name="local", nodes=1, devices_per_node=1, device=device, intra_node=link)


def _gpu_group(found: list[Gpu], measured: Measurements, launch_s: float, source: str) -> NodeGroup:
    """The catalogue's figures if it knows the part, else the measured ones.

    A peak cannot be measured, and one message does not fill all links of a GPU, which collectives use together; the
    measurements are in the tables.
    """
    gpu = local.alike(found)
    entry = catalogue.match(gpu.name, gpu.memory_bytes)
    if entry is not None:
        device = local.corrected(entry.device, gpu).model_copy(update={"kernel_launch_s": launch_s})
        link = local.gpu_link(entry, gpu, topology())
    else:
        device = Device(
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            memory_bandwidth_bytes_per_s=_bandwidth(measured),
            peak_flops_per_s=_peaks(measured),
            num_sms=gpu.num_sms,
            power_limit_w=gpu.power_limit_w,
            kernel_launch_s=launch_s,
            source=f"{source}: not in the catalogue; the peak is the fastest product measured",
        )
        link = measured_link(measured, source) or Link(
            bandwidth_bytes_per_s=gpu.pcie_bytes_per_s or _bandwidth(measured),
            latency_s=launch_s,
            source=f"{source}: a single device, nothing to connect",
        )
    return NodeGroup(name="local", nodes=1, devices_per_node=1, device=device, intra_node=link)


def _peaks(measured: Measurements) -> dict[str, float]:
    """The fastest product by dtype while all workers compute, FLOP/s of one device."""
    all_workers = max(sample.workers for sample in measured.matmul)
    peaks: dict[str, float] = {}
    for s in measured.matmul:
        if s.workers == all_workers:
            peaks[s.dtype] = max(peaks.get(s.dtype, 0.0), 2.0 * s.m * s.n * s.k / s.seconds)
    return peaks


def _bandwidth(measured: Measurements) -> float:
    """Bytes per second of one device while all devices stream."""
    return max(measured.memory, key=lambda sample: sample.workers).bytes_per_s


def measured_link(measured: Measurements, source: str) -> Link | None:
    """The best rate of a message between two workers, and the time of the fastest message beyond that of its bytes.

    None when there was one worker. Both are the least disturbed of their kind: another program can only add time.
    """
    messages = [s for s in measured.collectives if s.kind == "send_recv" and s.workers == 2]
    if not messages:
        return None
    rate = max(s.bytes / s.seconds for s in messages)
    fastest = min(messages, key=lambda s: s.seconds)
    return Link(
        bandwidth_bytes_per_s=rate,
        latency_s=max(0.0, fastest.seconds - fastest.bytes / rate),
        source=f"{source}: send and receive of two workers",
    )
