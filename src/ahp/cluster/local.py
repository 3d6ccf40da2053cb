"""This machine as a cluster of one node, as it describes itself; ``probe`` measures it instead."""

from __future__ import annotations

import platform
import time
from functools import cache
from itertools import permutations

import psutil

from ahp.cluster import catalogue, sense
from ahp.cluster.gpus import NVLINK, SWITCH, Connection, Gpu, gpus, topology
from ahp.cluster.meshes import mesh_of
from ahp.cluster.model import Cluster, Device, Link, NodeGroup
from ahp.errors import BadInput
from ahp.words import gib

# [Empirical] gloo over the loopback of a 2-core AMD EPYC (Zen 4) virtual machine, torch 2.13, 2026-11, by probe: send
# and receive of two workers. What a CPU "device" has until probe has measured it.
GLOO_BYTES_PER_S = 2.9e9
GLOO_LATENCY_S = 75.0e-6

# [Empirical] resident memory of a worker that has imported torch and joined a process group, same machine.
WORKER_BYTES = 234_000_000

COPY_BYTES = 64 * 2**20
"""Size of the timed copy if the cache size is unknown; else it is four times the last-level cache, at most four times this."""


def local_cluster() -> Cluster:
    """This machine, unmeasured: its GPUs as the catalogue knows them, else its processor's cores.

    Raises BadInput for GPUs that the catalogue does not know (``ahp probe`` measures those) or that differ.
    """
    found = gpus()
    group = gpu_group(found, topology()) if found else cpu_group()
    group = group.model_copy(update={"name": "local", "host": sense.host()})
    return Cluster(groups=(group,), source=f"sensed on {platform.node()}, not measured")


def gpu_group(found: list[Gpu], connections: list[Connection]) -> NodeGroup:
    """One node of equal GPUs that the catalogue knows, corrected by what the driver reports about them and their connections."""
    first = alike(found)
    entry = catalogue.match(first.name, first.memory_bytes)
    if entry is None:
        raise BadInput(
            f"cluster = 'local': {first.name!r} with {gib(first.memory_bytes)} is not in the catalogue; "
            "measure it with: ahp probe"
        )
    return NodeGroup(
        nodes=1,
        devices_per_node=len(found),
        nvlink_switch=nvlink_switch(entry.device.name, found),
        device=corrected(entry.device, first),
        intra_node=gpu_link(entry, first, connections),
    )


def alike(found: list[Gpu]) -> Gpu:
    """The first GPU, which represents all. Raises BadInput when they differ: a node has devices of one kind."""
    kinds = sorted({gpu.name for gpu in found})
    if len(kinds) > 1:
        raise BadInput(f"cluster = 'local': this machine's GPUs differ: {kinds}; choose some by CUDA_VISIBLE_DEVICES")
    return found[0]


def corrected(device: Device, gpu: Gpu) -> Device:
    """A catalogue device with the memory, SMs and power limit that the driver reports."""
    figures = {"memory_bytes": gpu.memory_bytes, "num_sms": gpu.num_sms, "power_limit_w": gpu.power_limit_w}
    known = {key: value for key, value in figures.items() if value is not None}
    return device.model_copy(update={**known, "source": f"{', '.join(known)}: driver; {device.source}"})


def gpu_link(entry: catalogue.Entry, gpu: Gpu, connections: list[Connection]) -> Link:
    """The connection of a node's GPUs as the driver reports it: NVLink if it joins every pair, else PCIe.

    A bridge that joins only some pairs does not speed up a collective over all. If the driver reports nothing, the
    catalogue's link.
    """
    link = entry.intra_node
    joined = all(connection.kind == NVLINK for connection in connections)
    if gpu.nvlink_bytes_per_s is not None and joined:
        rate, kind = gpu.nvlink_bytes_per_s, "NVLink"
    elif gpu.pcie_bytes_per_s is not None and (not joined or "PCI Express" in link.source):
        rate, kind = gpu.pcie_bytes_per_s, "PCIe"
    else:
        return link
    return link.model_copy(update={"bandwidth_bytes_per_s": rate, "source": f"{kind} by NVML; {link.source}"})


def nvlink_switch(device: str, found: list[Gpu]) -> bool | None:
    """Whether a switch joins a node's GPUs: the driver says where every link ends.

    None where it does not say so, or says something else than what is known of nodes of so many of these devices without a switch.
    """
    mesh, ends = mesh_of(device, len(found), False), [gpu.nvlink_ends for gpu in found]
    if mesh is not None and mesh.switch == "never":
        return None
    if ends and all(set(of_gpu) == {SWITCH} for of_gpu in ends):
        return True
    if mesh is None or any(len(of_gpu) != mesh.links for of_gpu in ends):
        return None
    between = {one.nvlink_ends.count(other.bus_id) for one, other in permutations(found, 2)}
    return False if between == {mesh.rings[2]} else None


def cpu_group() -> NodeGroup:
    """One node whose devices are the processor's physical cores."""
    entry = cpu_entry()
    return NodeGroup(nodes=1, devices_per_node=entry.devices_per_node, device=entry.device, intra_node=entry.intra_node)


def cpu_entry() -> catalogue.Entry:
    """The catalogue's ``cpu``: one physical core of this machine and its share of the memory, unmeasured."""
    cores = sense.physical_cores()
    flops_per_cycle, bf16_factor, units = _vector_units()
    hertz = _hertz()
    peaks = {"fp32": flops_per_cycle * hertz}
    if bf16_factor:
        peaks["bf16"] = bf16_factor * peaks["fp32"]
    device = Device(
        name=catalogue.CPU,
        memory_bytes=sense.memory_available_bytes() // cores,
        memory_bandwidth_bytes_per_s=_copy_bytes_per_s(),
        peak_flops_per_s=peaks,
        reserved_memory_bytes=WORKER_BYTES,
        source=f"{sense.cpu_name()}, one core: {units} at {hertz / 1e9:.2f} GHz; bandwidth of one timed copy",
    )
    return catalogue.Entry(
        device=device,
        intra_node=Link(
            bandwidth_bytes_per_s=GLOO_BYTES_PER_S,
            latency_s=GLOO_LATENCY_S,
            source="[Empirical] gloo over loopback, 2 workers on a 2-core AMD EPYC, 2026-11",
        ),
        devices_per_node=cores,
        network_latency_s=GLOO_LATENCY_S,
        network_source="latency: that of gloo over loopback, no network was measured",
    )


def _vector_units() -> tuple[int, int, str]:
    """fp32 operations per cycle and core, bf16 as a multiple of that (0 = none), and the reason.

    Intel 64 and IA-32 optimization manual; AMD Zen 4 optimization guide (512-bit operations take two cycles of the
    256-bit units); Arm Neoverse V2 optimization guide. A fused multiply-add counts as two operations.
    """
    flags = sense.cpu_flags()
    if "avx512f" in flags and sense.cpu_vendor() == "GenuineIntel":
        fp32, units = 2 * 16 * 2, "2 AVX-512 units"
    elif "avx2" in flags and "fma" in flags:
        fp32, units = 2 * 8 * 2, "2 AVX2 units"
    elif "asimd" in flags:
        fp32, units = 4 * 4 * 2, "4 NEON units"
    else:
        fp32, units = 2 * 4, "one addition and one multiplication of 4 values"
    if "amx_bf16" in flags:
        return fp32, 2048 // fp32, f"{units}, AMX"  # 16 x 16 x 32 multiply-adds in 16 cycles, doubled
    if "avx512_bf16" in flags or "bf16" in flags:
        return fp32, 2, f"{units}, bf16 dot products"
    return fp32, 0, units


def _hertz() -> float:
    frequency = psutil.cpu_freq()
    if frequency is not None and (frequency.max or frequency.current):
        return (frequency.max or frequency.current) * 1e6
    # [Empirical] virtual machines often hide the clock; server processors run near 2.5 GHz on all cores.
    return 2.5e9


@cache
def _copy_bytes_per_s() -> float:
    """Bytes read and written per second by one core that copies more than its caches hold; measured once per process."""
    import numpy as np

    cache = sense.last_level_cache_bytes()
    source = np.ones(min(4 * cache if cache else COPY_BYTES, 4 * COPY_BYTES), dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds)
