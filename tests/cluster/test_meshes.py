"""Nodes without a switch: which they are, how a cluster says it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ahp.cluster import catalogue
from ahp.cluster.meshes import _meshes, is_open, mesh_of
from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.search.problem import with_devices

BOARD = {"devices_per_node": 4, "device": "H200-SXM-141GB", "nvlink_switch": False}


def test_the_table_is_whole() -> None:
    names = catalogue.names()
    for mesh in _meshes():
        assert set(mesh.rings) == set(range(2, max(mesh.devices_per_node) + 1)), mesh.starts
        assert mesh.rings[max(mesh.rings)] <= mesh.links
        for start in mesh.starts:
            assert any(name.startswith(start) for name in names), start
    for name in names:
        known = [count for mesh in _meshes() if name.startswith(mesh.starts) for count in mesh.devices_per_node]
        assert len(known) == len(set(known)), "one mesh for each node"


@pytest.mark.parametrize(
    ("device", "count", "said", "share_of_two"),
    [
        ("A100-SXM-64GB", 4, None, 1 / 3),
        ("A100-SXM-64GB", 2, None, 1 / 3),  # two of a board of four
        ("H100-SXM-64GB", 4, None, 1 / 3),
        ("V100-SXM-32GB", 8, None, 1 / 6),
        ("V100-SXM-32GB", 4, None, 1 / 3),
        ("V100-SXM-32GB", 8, True, None),  # half of an HGX-2
        ("MI300X", 8, None, 1 / 7),
        ("MI325X", 4, None, 1 / 7),  # half of a node
        ("H100-SXM-80GB", 4, None, None),
        ("H100-SXM-80GB", 4, True, None),
        ("H100-SXM-80GB", 4, False, 1 / 3),
        ("H200-SXM-141GB", 2, False, 1 / 3),
        ("GH200-96GB", 4, False, 1 / 3),
        ("GH200-96GB", 2, None, None),
        ("H100-SXM-80GB", 8, None, None),
        ("H100-PCIe-80GB", 4, None, None),
        ("RTX-4090-24GB", 4, None, None),
    ],
)
def test_what_joins_the_devices_of_a_node(
    device: str, count: int, said: bool | None, share_of_two: float | None
) -> None:
    mesh = mesh_of(device, count, said)
    assert (mesh and mesh.share(2)) == (share_of_two and pytest.approx(share_of_two))


def test_groups_on_a_board_of_four_have_the_links_between_them() -> None:
    for device in ("A100-SXM-64GB", "H100-SXM-64GB"):
        mesh = mesh_of(device, 4, None)
        assert mesh is not None
        assert [mesh.share(n) for n in (2, 3, 4)] == pytest.approx([1 / 3, 2 / 3, 1])


def test_only_a_whole_board_that_nobody_describes_is_open() -> None:
    assert is_open("H100-SXM-80GB", 4, None)
    for device, count, said in (
        ("H100-SXM-80GB", 4, True),
        ("H100-SXM-80GB", 4, False),
        ("H100-SXM-80GB", 2, None),
        ("H100-SXM-80GB", 8, None),
        ("A100-SXM-64GB", 4, None),
        ("MI300X", 8, None),
        ("A100-PCIe-80GB", 4, None),
    ):
        assert not is_open(device, count, said), (device, count, said)


def test_a_cluster_says_it_in_both_forms_of_its_file(tmp_path: Path) -> None:
    cluster = Cluster.from_dict({"nodes": 2, **BOARD})
    assert cluster.groups[0].nvlink_switch is False
    cluster.save(tmp_path / "cluster.yaml")
    assert "nvlink_switch: false" in (tmp_path / "cluster.yaml").read_text()
    assert Cluster.load(tmp_path / "cluster.yaml") == cluster
    assert "nvlink_switch" not in Cluster.parse("2x4xH200").plain()["groups"][0]
    mixed = Cluster.from_dict(
        {"groups": [{"name": "a", **BOARD}, {"name": "b", "device": "H100", "inter_node_gbps": 400}]}
    )
    assert [group.nvlink_switch for group in mixed.groups] == [False, None]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "MI300X", "devices_per_node": 8, "nvlink_switch": True}, r"True: nodes of 8 MI300X have no switch \(valid: false, null\)"),
        ({"device": "A100-SXM-64GB", "nvlink_switch": True}, r"True: nodes of 4 A100-SXM-64GB have no switch \(valid: false, null\)"),
        ({"device": "H100-PCIe-80GB"}, r"False: H100-PCIe-80GB has no NVLink \(valid: null\)"),
        ({"device": "H100-PCIe-80GB", "nvlink_switch": True}, r"True: H100-PCIe-80GB has no NVLink \(valid: null\)"),
        ({"device": "A100-SXM-80GB", "devices_per_node": 8}, r"False: the links of a node of 8 A100-SXM-80GB without a switch are not known, only those of nodes of 1, 2, 3, 4 \(valid: true, null\)"),
        ({"device": "B200-SXM"}, r"False: the links of a node of 4 B200-SXM without a switch are not known \(valid: true, null\)"),
        ({"device": "GH200-96GB", "nodes": 2, "devices_per_nvlink_domain": 8}, "False: NVLink joins 8 devices of several nodes, which takes a switch"),
        ({"nvlink_switch": "perhaps"}, "nvlink_switch = 'perhaps'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=f"^cluster: .*nvlink_switch.*{words.removeprefix('nvlink_switch')}"):
        Cluster.from_dict({**BOARD, **changes})


def test_the_plain_form_is_held_to_the_same_rules() -> None:
    plain = Cluster.from_dict(BOARD).plain()
    plain["groups"][0]["devices_per_node"] = 8
    with pytest.raises(BadInput, match="nvlink_switch = False: the links of a node of 8 H200-SXM-141GB"):
        Cluster.from_dict(plain)


def test_a_part_of_a_cluster_can_be_read_again() -> None:
    for cluster, count in ((Cluster.from_dict(BOARD), 2), (Cluster.from_dict(BOARD), 1)):
        part = with_devices(cluster, count)
        assert part is not None
        assert part.groups[0].nvlink_switch is False
        assert Cluster.from_dict(part.plain()) == part
    two = with_devices(Cluster.from_dict({**BOARD, "device": "GH200-96GB"}), 2)
    assert two is not None
    assert two.groups[0].nvlink_switch is None, "the links of two are not known"
    assert Cluster.from_dict(two.plain()) == two
