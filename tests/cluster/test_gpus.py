"""GPUs through a made-up driver: what NVML says, how CUDA_VISIBLE_DEVICES chooses, what is left out."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ahp.cluster import local
from ahp.cluster.gpus import Gpu, _driver_nodes, gpus, topology
from ahp.errors import BadInput

MIB = 2**20


class NVMLError(Exception):
    """As the real module names it."""


class FakeNvml:
    """The questions that AHP asks of nvidia-ml-py, answered for equal cards."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    def __init__(
        self, names: list[Any], memory_mib: int, *, links: int = 0, driver: bool = True, ends: Any = None
    ) -> None:
        """``ends``: what a link of a GPU ends at, another GPU or "switch"; without it the driver does not say."""
        self.names, self.memory_mib, self.links, self.driver = names, memory_mib, links, driver
        self.ends = ends
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> Any:  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}abc"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=self.memory_mib * MIB)

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:  # noqa: N802
        return 500_000

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if not self.links:
            raise NVMLError
        return int(link < self.links)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0".encode())

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:  # noqa: N802
        return 2 if self._end(handle, link) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:  # noqa: N802
        end = self._end(handle, link)
        return SimpleNamespace(busId=f"00000000:{0xC0 if end == 'switch' else end:02x}:00.0")

    def _end(self, handle: int, link: int) -> Any:
        if self.ends is None:
            raise NVMLError
        return self.ends(handle, link)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:  # noqa: N802
        assert fields == [90]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=25_000))]

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, index: int) -> int:  # noqa: N802
        return 0 if self.links else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:  # noqa: N802
        return 10 if first // 2 == second // 2 else 50


def fake_torch(count: int = 0, sms: int = 132) -> Any:
    properties = SimpleNamespace(name="NVIDIA H100 PCIe", total_memory=85_000_000_000, multi_processor_count=sms)
    cuda = SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_properties=lambda index: properties,
    )
    return SimpleNamespace(cuda=cuda)


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_what_the_driver_says() -> None:
    nvml = FakeNvml(["NVIDIA H100 80GB HBM3"] * 2, 81559, links=18)
    first, second = gpus(nvml, fake_torch(2))
    assert (first.index, second.index) == (0, 1)
    assert first == Gpu(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=81559 * MIB,
        num_sms=132,
        power_limit_w=500,
        nvlink_bytes_per_s=18 * 25e9,
        pcie_bytes_per_s=pytest.approx(16 * 1.969e9),
        bus_id="00000000:00:00.0",
        nvlink_ends=(None,) * 18,
    )
    assert nvml.open == 0


def test_older_drivers_answer_bytes_and_less() -> None:
    (gpu,) = gpus(FakeNvml([b"Tesla T4"], 15360), fake_torch())
    assert (gpu.name, gpu.nvlink_bytes_per_s, gpu.num_sms) == ("Tesla T4", None, None)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,0", ["c", "a"]),
        ("GPU-1", ["b"]),
        ("", []),
        ("-1", []),
        ("0,9,1", ["a"]),
        (" 1 , 2 ", ["b", "c"]),
    ],
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in gpus(FakeNvml(["a", "b", "c"], 1024), fake_torch())] == names


def test_without_a_driver_torch_is_asked() -> None:
    found = gpus(FakeNvml([], 0, driver=False), fake_torch(2, sms=114))
    assert [(gpu.name, gpu.num_sms) for gpu in found] == [("NVIDIA H100 PCIe", 114)] * 2
    assert gpus(FakeNvml([], 0, driver=False), fake_torch(0)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows drivers in /dev")
def test_torch_is_not_imported_where_no_driver_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert not _driver_nodes(tmp_path)
    (tmp_path / "dev/kfd").touch()
    assert _driver_nodes(tmp_path)


def test_topology() -> None:
    kinds = {(c.first, c.second): c.kind for c in topology(FakeNvml(["x"] * 3, 1024))}
    assert kinds == {(0, 1): "PCIe switch", (0, 2): "across sockets", (1, 2): "across sockets"}
    assert {c.kind for c in topology(FakeNvml(["x"] * 3, 1024, links=4))} == {"NVLink"}
    assert topology(FakeNvml([], 0, driver=False)) == []


def node(nvml: FakeNvml, sms: int = 108) -> Any:
    return local.gpu_group(gpus(nvml, fake_torch(len(nvml.names), sms)), topology(nvml))


def test_node_of_known_gpus_takes_the_drivers_word() -> None:
    group = node(FakeNvml(["NVIDIA A100-SXM4-80GB"] * 4, 81920, links=12))
    assert (group.device.name, group.devices_per_node) == ("A100-SXM-80GB", 4)
    assert (group.device.memory_bytes, group.device.power_limit_w) == (81920 * MIB, 500)
    assert group.device.rated_power_w == 400
    assert group.intra_node.bandwidth_bytes_per_s == 12 * 25e9
    assert "NVML" in group.intra_node.source


def test_node_without_nvlink_takes_pcie() -> None:
    for count in (1, 2):
        group = node(FakeNvml(["NVIDIA GeForce RTX 4090"] * count, 24564), sms=128)
        assert group.intra_node.bandwidth_bytes_per_s == pytest.approx(16 * 1.969e9)


def test_bridges_of_pairs_do_not_count_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(["NVIDIA A100 80GB PCIe"] * 4, 81920, links=12)
    monkeypatch.setattr(nvml, "nvmlDeviceGetP2PStatus", lambda a, b, index: 0 if a // 2 == b // 2 else 5)
    assert node(nvml).intra_node.bandwidth_bytes_per_s == pytest.approx(16 * 1.969e9)
    nvml.names = nvml.names[:2]
    assert node(nvml).intra_node.bandwidth_bytes_per_s == 12 * 25e9


def board(handle: int, link: int) -> int:
    """The links of four devices without a switch: as many to each of the three others."""
    return [other for other in range(4) if other != handle][link % 3]


def behind_a_switch(handle: int, link: int) -> str:
    return "switch"


@pytest.mark.parametrize(
    ("name", "mib", "count", "links", "ends", "switch"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, 4, 12, board, False),
        ("NVIDIA H200", 143771, 4, 18, board, False),
        ("NVIDIA H200", 143771, 2, 18, board, False),  # CUDA shows two of the four
        ("NVIDIA H200", 143771, 4, 18, behind_a_switch, True),
        ("NVIDIA H200", 143771, 8, 18, behind_a_switch, True),
        ("NVIDIA H200", 143771, 4, 18, None, None),  # a driver that does not say
        ("NVIDIA H200", 143771, 4, 17, board, None),  # a link is down
        ("NVIDIA H200", 143771, 1, 18, board, None),
        ("NVIDIA H200", 143771, 4, 18, lambda handle, link: handle ^ 1, None),  # bridges of pairs
        ("NVIDIA A100 80GB PCIe", 81920, 2, 12, lambda handle, link: 1 - handle, None),
        ("NVIDIA A100-SXM4-80GB", 81920, 8, 12, lambda handle, link: (handle + 1 + link % 7) % 8, None),
        ("NVIDIA A100-SXM-64GB", 65536, 4, 12, behind_a_switch, None),  # the table knows it
        ("NVIDIA A100-SXM4-80GB", 81920, 4, 0, board, None),
    ],
)
def test_whether_a_switch_joins_the_devices(
    name: str, mib: int, count: int, links: int, ends: Any, switch: bool | None
) -> None:
    assert node(FakeNvml([name] * count, mib, links=links, ends=ends)).nvlink_switch is switch


def test_what_the_driver_does_not_say_is_the_catalogues() -> None:
    (gpu,) = gpus(FakeNvml(["NVIDIA H200"], 143771), fake_torch(1))
    assert local.gpu_group([gpu], []).intra_node.bandwidth_bytes_per_s == 450e9


def test_unknown_and_unequal_gpus_are_refused() -> None:
    with pytest.raises(BadInput, match=r"'NVIDIA A10'.*not in the catalogue"):
        node(FakeNvml(["NVIDIA A10"], 23028))
    with pytest.raises(BadInput, match="CUDA_VISIBLE_DEVICES"):
        node(FakeNvml(["NVIDIA A10", "Tesla T4"], 15360))
