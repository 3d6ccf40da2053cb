"""The GPUs of this machine: NVML (extra ``[nvidia]``) for what the driver knows, torch.cuda for what it counts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PCIE_BYTES_PER_S_PER_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Per direction after line coding, by generation: PCI-SIG base specifications."""

NVLINK = "NVLink"
SWITCH = "NVSwitch"
TOPOLOGY = {
    0: "board",
    10: "PCIe switch",
    20: "PCIe switches",
    30: "host bridge",
    40: "NUMA node",
    50: "across sockets",
}
"""NVML's nvmlGpuTopologyLevel_t in words, nearest first."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it; None = the driver does not say."""

    index: int
    """CUDA's number: the n-th visible GPU."""
    name: str
    memory_bytes: int
    num_sms: int | None = None
    power_limit_w: float | None = None
    nvlink_bytes_per_s: float | None = None
    """Per direction, all active links together."""
    pcie_bytes_per_s: float | None = None
    """Per direction, at the greatest width that the slot allows."""
    bus_id: str | None = None
    """Of the PCI bus."""
    nvlink_ends: tuple[str | None, ...] = ()
    """What each active link ends at: ``SWITCH``, or the bus ID of another GPU; None = the driver does not say."""


@dataclass(frozen=True)
class Connection:
    """How two GPUs reach each other: ``NVLink``, or the nearest common ancestor of their PCIe paths."""

    first: int
    second: int
    kind: str


def gpus(nvml: Any = None, torch: ModuleType | None = None) -> list[Gpu]:
    """The GPUs that CUDA would show this process, in its order; empty without a driver.

    ``nvml`` and ``torch`` replace the modules; by default both are imported if they are installed.
    """
    nvml = nvml or _nvml()
    if nvml is None:
        return _from_torch(torch)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return _from_torch(torch)
    try:
        handles = _visible(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        counted = {gpu.index: gpu.num_sms for gpu in _from_torch(torch)} if handles else {}
        return [_read(nvml, index, handle, counted.get(index)) for index, handle in enumerate(handles)]
    finally:
        nvml.nvmlShutdown()


def topology(nvml: Any = None) -> list[Connection]:
    """How each pair of visible GPUs is connected; empty without NVML."""
    nvml = nvml or _nvml()
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = _visible(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        pairs = [(i, j) for i in range(len(handles)) for j in range(i + 1, len(handles))]
        return [Connection(i, j, _connection(nvml, handles[i], handles[j])) for i, j in pairs]
    finally:
        nvml.nvmlShutdown()


def _nvml() -> Any:
    try:
        import pynvml  # pyright: ignore[reportMissingImports] - an extra
    except ImportError:
        return None
    return pynvml


def _from_torch(torch: ModuleType | None) -> list[Gpu]:
    """The GPUs through the CUDA runtime (ROCm's torch has the same names), which counts SMs; NVML does not."""
    if torch is None:
        if not _driver_nodes():
            return []
        import torch as installed

        torch = installed
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, properties.name, properties.total_memory, properties.multi_processor_count))
    return found


def _driver_nodes(root: Path = Path("/")) -> bool:
    """Whether a GPU driver may be loaded; False saves importing torch. Only Linux shows it in /dev."""
    if sys.platform != "linux":
        return True
    # NVIDIA's driver, AMD's, and either under Windows' Linux.
    return any((root / "dev" / name).exists() for name in ("nvidiactl", "kfd", "dxg"))


def _visible(nvml: Any, visible: str | None) -> list[Any]:
    """Handles in CUDA's order. As CUDA does, the list ends at the first word that names no device."""
    handles = (_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, i) for i in range(nvml.nvmlDeviceGetCount()))
    every = [handle for handle in handles if handle is not None]  # a GPU that has left the bus has none
    if visible is None:
        return every
    identities = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in every]
    chosen = []
    for word in (w.strip() for w in visible.split(",")):
        if word.isdigit() and int(word) < len(every):
            chosen.append(every[int(word)])
            continue
        named = [h for h, identity in zip(every, identities, strict=True) if word and identity.startswith(word)]
        if len(named) != 1:
            break
        chosen.append(named[0])
    return chosen


def _read(nvml: Any, index: int, handle: Any, num_sms: int | None) -> Gpu:
    milliwatts = _ask(nvml, nvml.nvmlDeviceGetPowerManagementLimit, handle)
    generation = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    lane_bytes_per_s = PCIE_BYTES_PER_S_PER_LANE.get(generation) if generation else None
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        num_sms=num_sms,
        power_limit_w=milliwatts / 1000 if milliwatts else None,
        nvlink_bytes_per_s=_nvlink_bytes_per_s(nvml, handle),
        pcie_bytes_per_s=lanes * lane_bytes_per_s if lanes and lane_bytes_per_s else None,
        bus_id=_bus_id(_ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)),
        nvlink_ends=tuple(_nvlink_end(nvml, handle, link) for link in _active_links(nvml, handle)),
    )


def _nvlink_bytes_per_s(nvml: Any, handle: Any) -> float | None:
    """Active links times the speed of each, per direction; None if there is no NVLink."""
    active = len(_active_links(nvml, handle))
    if not active:
        return None
    fields = _ask(nvml, nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    if not fields or fields[0].nvmlReturn != nvml.NVML_SUCCESS or not fields[0].value.uiVal:
        return None
    return active * fields[0].value.uiVal * 1e6


def _active_links(nvml: Any, handle: Any) -> list[int]:
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    return [link for link in links if _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)]


def _nvlink_end(nvml: Any, handle: Any, link: int) -> str | None:
    """What a link ends at. NCCL asks the driver for the same (src/graph/xml.cc, ncclTopoGetXmlFromGpu)."""
    if _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return SWITCH
    return _bus_id(_ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))


def _bus_id(pci: Any) -> str | None:
    return None if pci is None else _text(pci.busId).lower()


def _connection(nvml: Any, first: Any, second: Any) -> str:
    status = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status is not None and status == nvml.NVML_P2P_STATUS_OK:
        return NVLINK
    level = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
    return TOPOLOGY.get(level, "unknown") if level is not None else "unknown"


def _ask(nvml: Any, question: Any, *arguments: Any) -> Any:
    """The answer to an optional question; None if this driver or this part does not answer it."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
