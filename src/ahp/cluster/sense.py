"""What this machine is, without measuring it: processor, memory, container limits, network cards.

Every function takes ``root``, the folder under which ``/proc`` and ``/sys`` are read, so that tests can present any
machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from ahp.cluster.model import Host
from ahp.cluster.storage import storage

ROOT = Path("/")
UNLIMITED_BYTES = 2**60
"""From here on a limit means none: control groups of version 1 print a number near 2**63 for no limit."""


def host(path: str | Path = ".", root: Path = ROOT) -> Host:
    """This node apart from its devices; ``path`` is where runs would be written, for the storage."""
    disk = storage(path, root)
    return Host(
        cpu=cpu_name(root),
        cores=physical_cores(root),
        processors=cpu_quota(root),
        memory_bytes=memory_limit_bytes(root),
        numa_nodes=numa_nodes(root),
        network_gbps=network_gbps(root),
        storage_path=disk.path,
        storage_kind=disk.kind,
        storage_free_bytes=disk.free_bytes,
    )


def cpu_name(root: Path = ROOT) -> str:
    """The processor's own name, or its architecture if it has none."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return os.uname().machine


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Instruction set extensions in Linux's spelling; empty if they cannot be read."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_vendor(root: Path = ROOT) -> str:
    """The processor's vendor, such as GenuineIntel or AuthenticAMD; empty if it cannot be read."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "vendor_id":
            return value.strip()
    return ""


def usable_cpus() -> set[int]:
    """Logical processors that this process can run on (cpuset and affinity)."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(root: Path = ROOT, cpus: set[int] | None = None) -> int:
    """Physical cores that this process can use: affinity, hyper-threads counted once, container quota; at least 1."""
    cpus = usable_cpus() if cpus is None else cpus
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = _read(topology / "physical_package_id").strip(), _read(topology / "core_id").strip()
        cores.add((package, core) if core else cpu)
    quota = cpu_quota(root)
    count = len(cores) if quota is None else min(len(cores), math.floor(quota + 1e-9))
    return max(1, count)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors' worth of time that the control groups grant, the tightest of all levels; None = no limit."""
    quotas = []
    for folder in _control_groups("cpu", root):
        text = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us").strip(),
            _read(folder / "cpu.cfs_period_us").strip(),
        ]
        if len(text) == 2 and text[0].isdigit() and text[1].isdigit() and int(text[1]) > 0:
            quotas.append(int(text[0]) / int(text[1]))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = ROOT) -> int:
    """Memory that this process can use in total: the machine's, or the control groups' tightest limit."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_groups(root))])


def memory_available_bytes(root: Path = ROOT) -> int:
    """Memory that can be taken now without swapping, within the control groups' limits."""
    free = [psutil.virtual_memory().available, *(max(0, limit - used) for limit, used in _memory_groups(root))]
    return min(free)


def numa_nodes(root: Path = ROOT) -> int | None:
    """NUMA nodes of the machine; None if it does not say."""
    count = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    return count or None


def last_level_cache_bytes(root: Path = ROOT) -> int | None:
    """Size of the largest cache that the first usable processor sees; None if it cannot be read."""
    sizes = []
    for index in (root / f"sys/devices/system/cpu/cpu{min(usable_cpus())}/cache").glob("index*"):
        text = _read(index / "size").strip()
        if text[:-1].isdigit() and text[-1] in "KMG":
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes, default=None)


def network_gbps(root: Path = ROOT) -> float | None:
    """Gb/s per direction of this node's network: all active InfiniBand and RoCE ports, else the fastest Ethernet.

    None if no card reports its speed, which virtual cards often do not.
    """
    rates = []
    for port in (root / "sys/class/infiniband").glob("*/ports/*"):
        rate = _read(port / "rate").split()
        if rate and "ACTIVE" in _read(port / "state"):
            rates.append(float(rate[0]))
    if rates:
        return sum(rates)
    speeds = []
    for card in (root / "sys/class/net").glob("*"):
        text = _read(card / "speed").strip()
        if (card / "device").exists() and text.isdigit() and int(text) > 0:
            speeds.append(int(text) / 1000)
    return max(speeds, default=None)


def network_kind(root: Path = ROOT) -> str | None:
    """The kind of this node's network, a name under ``networks`` in catalogue.yaml, from its cards; one InfiniBand card decides.

    None if no RDMA card has an active port: its Ethernet may then be a management network.
    Linux, Documentation/ABI/stable/sysfs-class-infiniband: link_layer. AWS's cards have a driver of their own there, Slingshot's a class.
    """
    found = {"slingshot"} if any((root / "sys/class/cxi").glob("cxi*")) else set()
    for port in (root / "sys/class/infiniband").glob("*/ports/*"):
        if "ACTIVE" in _read(port / "state"):
            driver = (port.parents[1] / "device/driver").resolve().name
            found.add("efa" if driver == "efa" else _read(port / "link_layer").strip().lower())
    return next((kind for kind in ("infiniband", "efa", "slingshot", "ethernet") if kind in found), None)


def _memory_groups(root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of every control group level that has a limit; reclaimable page cache does not count as used."""
    groups = []
    for folder in _control_groups("memory", root):
        new = (folder / "memory.max").exists()
        limit = _read(folder / ("memory.max" if new else "memory.limit_in_bytes")).strip()
        used = _read(folder / ("memory.current" if new else "memory.usage_in_bytes")).strip()
        if not limit.isdigit() or int(limit) >= UNLIMITED_BYTES:
            continue
        cache = 0
        for line in _read(folder / "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == ("inactive_file" if new else "total_inactive_file"):
                cache = int(value)
        groups.append((int(limit), max(0, int(used or 0) - cache)))
    return groups


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's control group and of those above it, versions 2 and 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path in /proc may be the host's; then only the mount's own root can be read.
        folder = base / own.strip("/")
        while True:
            yield folder
            if folder == base:
                break
            folder = folder.parent


def _read(path: Path) -> str:
    """A kernel file's text, or "" if it is missing or not readable (some cards' speed raises EINVAL)."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
