"""NVLink domains larger than a host: how a cluster describes them, and the time of their collectives."""

import json
from pathlib import Path
from typing import Any

import pytest

from ahp.cluster import managers
from ahp.cluster.cells import place
from ahp.cluster.domains import hosts_per_domain, joined
from ahp.cluster.model import Cluster, NodeGroup
from ahp.errors import BadInput
from ahp.plan import Parallelism


def group(what: Any) -> NodeGroup:
    (found,) = Cluster.resolve(what).groups
    return found


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("64x4xGB200-NVL72", 64),  # 16 hosts of each of 4 racks
        ("36x4xGB300", 72),  # two racks, whole
        ("18x4xGB200", 72),
        ("17x4xGB200", 72),
        ("20x4xGB200", 64),
        ("2x4xGB200", 64),
        ("16x8xGB200", 64),
        ("4x64xGB200", None),
        ("2x72xGB200", None),
        ("1x4xGB200", None),
        ("8x8xH100-SXM-80GB", None),
        ("32x1xGH200-96GB", None),
    ],
)
def test_the_catalogue_knows_what_nvlink_joins(text: str, domain: int | None) -> None:
    assert group(text).devices_per_nvlink_domain == domain


def test_hosts_in_a_domain_are_as_the_domain_itself() -> None:
    hosts, racks = group("64x4xGB200-NVL72"), group("4x64xGB200-NVL72")
    assert joined(hosts).model_dump(exclude={"inter_node"}) == racks.model_dump(exclude={"inter_node"})
    assert joined(hosts).inter_node == racks.inter_node
    assert hosts.num_devices == 256
    assert joined(group("2x4xGB200-NVL72")).devices_per_node == 8
    h100 = group("8x8xH100-SXM-80GB")
    assert joined(h100) is h100


def test_hosts_that_do_not_fill_the_last_domain() -> None:
    assert (joined(group("19x4xGB200")).nodes, joined(group("19x4xGB200")).devices_per_node) == (2, 64)


def test_a_user_says_it() -> None:
    words = {"nodes": 64, "devices_per_node": 1, "device": "GH200-96GB", "devices_per_nvlink_domain": 32}
    assert joined(group(words)).devices_per_node == 32
    assert joined(group(words)).nodes == 2
    apart = {"nodes": 64, "devices_per_node": 4, "device": "GB200", "devices_per_nvlink_domain": 4}
    assert group(apart).devices_per_nvlink_domain is None


@pytest.mark.parametrize(
    ("key", "device", "words"),
    [
        (6, "GB200", r"devices_per_nvlink_domain = 6: a domain has whole nodes of 4 devices \(valid: 4, 8\)"),
        (2, "GB200", r"a domain has whole nodes of 4 devices \(valid: 4\)"),
        (8, "L4-24GB", r"devices_per_nvlink_domain = 8: L4-24GB has no NVLink"),
        (8, "MI300X", "has no NVLink"),
        (8, "cpu", "has no NVLink"),
    ],
)
def test_what_cannot_be_is_refused(key: int, device: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        group(
            {
                "nodes": 2,
                "devices_per_node": 4,
                "device": device,
                "inter_node_gbps": 100,
                "devices_per_nvlink_domain": key,
            }
        )


def test_it_is_in_the_file(tmp_path: Path) -> None:
    cluster = Cluster.parse("64x4xGB200-NVL72")
    cluster.save(tmp_path / "cluster.yaml")
    assert Cluster.load(tmp_path / "cluster.yaml") == cluster
    assert cluster.plain()["groups"][0]["devices_per_nvlink_domain"] == 64
    assert "devices_per_nvlink_domain" not in Cluster.parse("8x8xH100").plain()["groups"][0]
    plain = cluster.plain()
    plain["groups"][0]["devices_per_nvlink_domain"] = 62
    with pytest.raises(BadInput, match="must be a multiple of devices_per_node 4"):
        Cluster.from_dict(plain)


def test_cells_on_hosts_of_one_domain_share_a_node() -> None:
    words = {
        "groups": [{"name": name, "nodes": 32, "devices_per_node": 4, "device": name} for name in ("GB200", "GB300")]
    }
    layout = Parallelism(pipeline_parallel_degree=32, tensor_parallel_degree=8)
    cells = place(Cluster.from_dict(words), layout).cells[0]
    assert [cells[0].shares_node(cells[i]) for i in (1, 7, 8, 16)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("hosts", "reckoned"), [([18, 18, 9], 18), ([16], 16), ([16, 16], 16), ([9, 18, 18], 9), ([18, 4, 18], 4)]
)
def test_blocks_of_unlike_numbers(hosts: list[int], reckoned: int) -> None:
    assert hosts_per_domain(hosts) == reckoned


def slurm_with_blocks(nodes: int, blocks: dict[str, str], names: dict[str, list[str]]) -> Any:
    gres = [{"name": f"n{i}", "gres": "gpu:gb200:4"} for i in range(nodes)]
    shown = [f"BlockName={name} BlockIndex={i} Nodes={of} BlockSize=18" for i, (name, of) in enumerate(blocks.items())]

    def run(command: list[str]) -> str | None:
        if command[:3] == ["scontrol", "show", "node"]:
            return json.dumps({"nodes": gres})
        if command[:3] == ["scontrol", "show", "topology"]:
            return "\n".join(shown) if blocks else "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-9]"
        return "\n".join(names[command[3]])

    return run


def job(nodes: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "job",
        "SLURM_GPUS_ON_NODE": "4",
    }


def test_slurm_says_which_hosts_are_in_a_block() -> None:
    nodes = [f"n{i}" for i in range(12)]
    names = {"job": nodes, "a": nodes[:6], "b": [*nodes[6:], "n99"]}
    cluster = managers.slurm(job(12), slurm_with_blocks(12, {"r1": "a", "r2": "b"}, names), found=[])
    assert cluster.groups[0].devices_per_nvlink_domain == 24
    plain = managers.slurm(job(12), slurm_with_blocks(12, {}, names), found=[])
    assert plain.groups[0].devices_per_nvlink_domain == 64  # as the catalogue knows


def test_kubernetes_says_which_hosts_are_in_a_clique() -> None:
    def node(clique: str, product: str) -> dict[str, Any]:
        labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.clique": clique}
        ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": "4"}}
        return {"metadata": {"name": "w", "labels": labels}, "spec": {}, "status": ready}

    for product, domain in (("NVIDIA-GB200", 12), ("NVIDIA-H100-80GB-HBM3", None)):
        items = [node(f"ab.{i % 2}", product) for i in range(6)]
        cluster = managers.kubernetes({}, lambda _, items=items: json.dumps({"items": items}), found=[])
        assert (cluster.groups[0].nodes, cluster.groups[0].devices_per_nvlink_domain) == (6, domain)
