"""What a machine says of itself, read from made-up /proc and /sys trees; and this machine, for sanity."""

from pathlib import Path

import psutil
import pytest

from ahp.cluster import disk, local, sense
from ahp.cluster.storage import storage


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cpus(count: int, threads: int) -> dict[str, str]:
    """Topology files of ``count`` logical processors, ``threads`` to a core, neighbours sharing."""
    files = {}
    for cpu in range(count):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = "0\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = f"{cpu // threads}\n"
    return files


def test_hyper_threads_count_once(tmp_path: Path) -> None:
    root = tree(tmp_path, cpus(8, threads=2))
    assert sense.physical_cores(root, set(range(8))) == 4
    assert sense.physical_cores(root, {0, 1, 2}) == 2


def test_processors_without_topology_count_each(tmp_path: Path) -> None:
    assert sense.physical_cores(tmp_path, {0, 1, 2}) == 3


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_quota_of_control_group_version_2(tmp_path: Path, quota: str, cores: int) -> None:
    root = tree(tmp_path, {**cpus(8, 1), "proc/self/cgroup": "0::/pod/job\n", "sys/fs/cgroup/pod/cpu.max": quota})
    assert sense.physical_cores(root, set(range(8))) == cores


def test_quota_of_control_group_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/job\n0::/\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert sense.physical_cores(tree(tmp_path, {**cpus(8, 1), **files}), set(range(8))) == 3


def test_memory_of_control_group_version_2_is_the_tightest_level(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/job\n",
        "sys/fs/cgroup/pod/memory.max": f"{300 * 2**20}\n",
        "sys/fs/cgroup/pod/memory.current": f"{120 * 2**20}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {20 * 2**20}\n",
        "sys/fs/cgroup/pod/job/memory.max": "max\n",
    }
    root = tree(tmp_path, files)
    assert sense.memory_limit_bytes(root) == 300 * 2**20
    assert sense.memory_available_bytes(root) == 200 * 2**20


def test_memory_of_control_group_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/not/seen/in/the/container\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{256 * 2**20}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{56 * 2**20}\n",
    }
    root = tree(tmp_path, files)
    assert sense.memory_limit_bytes(root) == 256 * 2**20
    assert sense.memory_available_bytes(root) == 200 * 2**20


def test_no_limit_is_the_machine(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}
    assert sense.memory_limit_bytes(tree(tmp_path, files)) == psutil.virtual_memory().total


def test_cpu_words(tmp_path: Path) -> None:
    root = tree(
        tmp_path, {"proc/cpuinfo": "vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 fma\n"}
    )
    assert sense.cpu_name(root) == "AMD EPYC"
    assert sense.cpu_vendor(root) == "AuthenticAMD"
    assert sense.cpu_flags(root) == {"fpu", "avx2", "fma"}


def test_network_prefers_active_infiniband(tmp_path: Path) -> None:
    root = tree(tmp_path, {"sys/class/net/eth0/speed": "25000\n", "sys/class/net/eth0/device/vendor": "x"})
    assert sense.network_gbps(root) == 25
    ports = {
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_1/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    }
    assert sense.network_gbps(tree(tmp_path, ports)) == 400


def card(name: str, layer: str, driver: str, state: str = "4: ACTIVE") -> dict[str, str]:
    port = f"sys/class/infiniband/{name}/ports/1"
    return {f"{port}/state": state, f"{port}/link_layer": layer, f"sys/class/infiniband/{name}/device/{driver}": ""}


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, None),
        (card("mlx5_0", "Ethernet", "x") | card("mlx5_1", "InfiniBand", "x"), "infiniband"),
        (card("mlx5_0", "Ethernet", "x") | card("mlx5_1", "InfiniBand", "x", "1: DOWN"), "ethernet"),
        ({"sys/class/cxi/cxi0/device/vendor": ""}, "slingshot"),
        (card("rdmap0s6", "Unknown", "x"), None),
    ],
)
def test_cards_say_what_the_network_is(tmp_path: Path, files: dict[str, str], kind: str | None) -> None:
    assert sense.network_kind(tree(tmp_path, files)) == kind


def test_the_driver_says_that_a_card_is_awss(tmp_path: Path) -> None:
    root = tree(tmp_path, card("rdmap0s6", "Unknown", "x") | {"sys/bus/pci/drivers/efa/uevent": ""})
    (root / "sys/class/infiniband/rdmap0s6/device/driver").symlink_to(root / "sys/bus/pci/drivers/efa")
    assert sense.network_kind(root) == "efa"


@pytest.mark.parametrize(
    ("mount", "kind"),
    [
        ("/dev/nvme0n1p2 / ext4 rw 0 0", "nvme"),
        ("/dev/sda1 / ext4 rw 0 0", "rotational"),
        ("/dev/sdb / xfs rw 0 0", "ssd"),
        ("/dev/vda / ext4 rw 0 0", "virtual"),
        ("/dev/mapper-root / ext4 rw 0 0", "nvme"),
        ("overlay / overlay rw 0 0", "overlay"),
        ("server:/home / nfs4 rw 0 0", "network"),
        ("tmpfs / tmpfs rw 0 0", "memory"),
    ],
)
def test_storage_kind(tmp_path: Path, mount: str, kind: str) -> None:
    disks = {
        "sys/class/block/nvme0n1/nvme0n1p2/partition": "2",
        "sys/class/block/sda/sda1/partition": "1",
        "sys/class/block/sda/queue/rotational": "1",
        "sys/class/block/sdb/queue/rotational": "0",
        "sys/class/block/vda/queue/rotational": "1",
    }
    root = tree(tmp_path, {**disks, "proc/mounts": mount + "\n"})
    block = root / "sys/class/block"
    (block / "nvme0n1p2").symlink_to(block / "nvme0n1/nvme0n1p2")
    (block / "sda1").symlink_to(block / "sda/sda1")
    (block / "mapper-root/slaves").mkdir(parents=True)
    (block / "mapper-root/slaves/nvme0n1").symlink_to(block / "nvme0n1")
    assert storage("/", root).kind == kind


def test_storage_of_the_longest_mount(tmp_path: Path) -> None:
    inner = tmp_path / "a b"
    inner.mkdir()
    point = str(inner.resolve()).replace(" ", "\\040")
    root = tree(tmp_path / "root", {"proc/mounts": f"/dev/vda / ext4 rw 0 0\nsrv:/x {point} nfs rw 0 0\n"})
    found = storage(inner / "not" / "yet", root)
    assert (found.kind, found.path) == ("network", str(inner.resolve()))
    assert found.free_bytes > 0
    assert storage("/", root).kind == "virtual"


def test_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    written, read = disk.throughput(tmp_path, 4 * 2**20)
    assert written is not None
    assert written > 0
    assert read is None or read > 0
    assert list(tmp_path.iterdir()) == []


def test_disk_that_is_too_small_is_not_filled(tmp_path: Path) -> None:
    assert disk.throughput(tmp_path, 10**18) == (None, None)


def test_this_machine() -> None:
    host = sense.host()
    assert host.cores is not None
    assert 1 <= host.cores <= len(sense.usable_cpus())
    assert host.memory_bytes is not None
    assert 2**28 < sense.memory_available_bytes() <= host.memory_bytes
    assert host.storage_free_bytes is not None


def test_local_cluster_without_gpus_is_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "gpus", list)
    cluster = local.local_cluster()
    (group,) = cluster.groups
    assert (group.nodes, group.inter_node, group.name, group.device.name) == (1, None, "local", "cpu")
    assert group.devices_per_node == group.host.cores
    assert group.host.memory_bytes is not None
    assert group.devices_per_node * group.device.memory_bytes <= group.host.memory_bytes
    assert "not measured" in cluster.source
