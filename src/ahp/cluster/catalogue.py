"""The devices that are known without measurements, each figure with its source (catalogue.yaml)."""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import Any

from ahp.cluster.model import Device, Link
from ahp.errors import BadInput
from ahp.job import Record
from ahp.shipped import shipped
from ahp.violations import shortened
from ahp.words import GIB

MIB_BYTES = 2**20
BYTES_PER_S_PER_GBPS = 1.0e9 / 8
"""Networks count in 10^9 bits per second."""

CPU = "cpu"
UNNAMED_NETWORK = "ethernet"
"""The assumed kind of a network, if it is not given."""
_NOISE = ("nvidia", "amd", "graphics", "device")


class Entry(Record):
    """A device with its usual node and network."""

    device: Device
    aliases: tuple[str, ...] = ()
    intra_node: Link
    has_nvlink: bool = False
    devices_per_node: int
    devices_per_nvlink_domain: int | None = None
    """Devices that NVLink joins across hosts; None = only those of one host."""
    nic_gbps: float | None = None
    """Network of a node divided by its number of devices, Gb/s per direction; None = no usual network."""
    network_latency_s: float
    network_source: str

    def inter_node(self, devices_per_node: int) -> Link | None:
        """The usual network of a node with ``devices_per_node`` of these devices; None when there is no usual one."""
        if self.nic_gbps is None:
            return None
        gbps = self.nic_gbps * devices_per_node
        return self.network(gbps, f"{self.network_source}; {self.nic_gbps:g} Gb/s for each device")

    def network(self, gbps: float, source: str) -> Link:
        """A network of ``gbps`` Gb/s per node and direction, with the usual latency."""
        return Link(bandwidth_bytes_per_s=gbps * BYTES_PER_S_PER_GBPS, latency_s=self.network_latency_s, source=source)


def names() -> list[str]:
    """Every catalogue name, ``cpu`` last."""
    return [*_entries(), CPU]


def find(name: str, key: str = "device") -> Entry:
    """The entry of a catalogue name, an alias, or a name as the driver prints it; case and punctuation are ignored.

    ``key`` is what the user calls the value. Raises BadInput with the nearest names when nothing matches.
    """
    entry = lookup(name)
    if entry is None:
        near = f" (nearest: {', '.join(found)})" if (found := _nearest(name)) else ""
        raise BadInput(f"{key} = {shortened(name)}: not in the catalogue; ahp devices lists it{near}")
    return entry


def lookup(name: str) -> Entry | None:
    """Like ``find``, but None when nothing matches."""
    words = _words(name)
    if words == CPU:
        return _cpu_entry()
    for canonical, entry in _entries().items():
        if words in {_words(spelling) for spelling in (canonical, *entry.aliases)}:
            return entry
    return None


def match(name: str, memory_bytes: int) -> Entry | None:
    """The entry of the device that a driver calls ``name``; its memory decides between devices of one name.

    NVML prints ``NVIDIA H100 80GB HBM3`` for one part, but only ``Tesla V100-SXM2-16GB`` or ``NVIDIA H200`` for others.
    None when no entry has the name and, within 5 %, the memory: then nothing is known about the device.
    """
    words = _words(name)
    close = [e for e in _entries().values() if abs(e.device.memory_bytes / memory_bytes - 1) < 0.05]
    for entry in close:
        if words in {_words(spelling) for spelling in (entry.device.name, *entry.aliases)}:
            return entry
    # PCIe and SXM parts of one name and size differ in everything else, so the form factor must not be guessed. Cards whose
    # names start with RTX differ in the rest of the name: they are found by their aliases or not at all.
    tokens = set(re.split(r"[^a-z0-9]+", name.lower()))
    on_pcie = bool(tokens & {"pcie", "nvl"})
    for entry in close:
        model = entry.device.name.split("-")[0].lower()
        if model != "rtx" and model in tokens and ("PCIe" in entry.device.name) == on_pcie:
            return entry
    return None


def _words(name: str) -> str:
    text = re.sub(r"[\W_]+", " ", name.lower())
    return "".join(word for word in text.split() if word not in _NOISE)


def _nearest(name: str) -> list[str]:
    spelled = {_words(alias): canonical for canonical, e in _entries().items() for alias in (canonical, *e.aliases)}
    close = difflib.get_close_matches(_words(name), list(spelled), n=8, cutoff=0.4)
    return list(dict.fromkeys(spelled[c] for c in close))[:5]


def with_network(link: Link, kind: str) -> Link:
    """The link with the hop latency of a kind of network, a name under ``networks`` in catalogue.yaml."""
    hop = _catalogue()["networks"][kind]
    return with_latency(link, hop["latency_s"], f"{kind}, {hop['source']}")


def with_latency(link: Link, latency_s: float, source: str) -> Link:
    """The link with another hop latency, and the source of that."""
    source = f"{link.source.split('; latency: ')[0]}; latency: {source}"
    return link.model_copy(update={"latency_s": latency_s, "source": source})


@cache
def _catalogue() -> dict[str, Any]:
    return shipped("ahp.cluster", "catalogue.yaml")


@cache
def _entries() -> dict[str, Entry]:
    data = _catalogue()
    return {name: _entry(name, raw, data) for name, raw in data["devices"].items()}


def _entry(name: str, raw: dict[str, Any], data: dict[str, Any]) -> Entry:
    memory_bytes = int(raw["driver_mib"] * MIB_BYTES)
    held_by_driver_bytes = max(0, memory_bytes - int(raw["torch_gib"] * GIB))
    sources = raw["sources"]
    device = Device(
        name=name,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=raw["memory_gb_per_s"] * 1e9,
        peak_flops_per_s={precision: tflops * 1e12 for precision, tflops in raw["peak_tflops"].items()},
        num_sms=raw["num_sms"],
        power_limit_w=raw["power_w"],
        rated_power_w=raw["power_w"],
        kernel_launch_s=data["kernel_launch_s"],
        host_bandwidth_bytes_per_s=raw["host_gb_per_s"] * 1e9,
        reserved_memory_bytes=held_by_driver_bytes + int(data["context_bytes"]),
        source="; ".join(f"{keys}: {source}" for keys, source in sources.items()),
    )
    kind = raw.get("network", UNNAMED_NETWORK)
    hop, network = data["links"][raw["link"]], data["networks"][kind]
    return Entry(
        device=device,
        aliases=tuple(raw.get("aliases", ())),
        intra_node=Link(
            bandwidth_bytes_per_s=raw["link_gb_per_s"] * 1e9,
            latency_s=hop["latency_s"],
            source=f"{_source_of('link_gb_per_s', sources)}; latency: {hop['source']}",
        ),
        has_nvlink=raw["link"] == "nvlink",
        devices_per_node=raw["devices_per_node"],
        devices_per_nvlink_domain=raw.get("devices_per_nvlink_domain"),
        nic_gbps=raw.get("nic_gbps"),
        network_latency_s=network["latency_s"],
        network_source=f"{_source_of('devices_per_node', sources)}; latency: {kind}, {network['source']}",
    )


def _source_of(figure: str, sources: dict[str, str]) -> str:
    """The source of one figure; ``sources`` maps ``figure, figure, ...`` to a source."""
    for keys, source in sources.items():
        if figure in (key.strip() for key in keys.split(",")):
            return source
    raise AssertionError(f"catalogue.yaml: {figure} has no source")


def _cpu_entry() -> Entry:
    from ahp.cluster.local import cpu_entry

    return cpu_entry()
