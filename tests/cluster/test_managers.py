"""Slurm and Kubernetes, on output in the form that their programs print."""

import json
from typing import Any

import pytest

from ahp.cluster import managers
from ahp.cluster.gpus import Gpu
from ahp.cluster.model import Cluster
from ahp.errors import BadInput

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_GPUS_ON_NODE": "8",
}
H100 = Gpu(index=0, name="NVIDIA H100 80GB HBM3", memory_bytes=81559 * 2**20, num_sms=132)


def scontrol(*gres: str) -> str:
    nodes = [
        {"name": f"gpu{i:02}", "cpus": 192, "real_memory": 2051000, "gres": g, "state": ["ALLOCATED"], "features": []}
        for i, g in enumerate(gres)
    ]
    return json.dumps({"nodes": nodes, "meta": {"plugin": {"data_parser": "data_parser/v0.0.41"}}, "errors": []})


def sinfo(*entries: tuple[list[str], str]) -> str:
    found = [
        {"nodes": {"total": len(names), "nodes": names}, "gres": {"total": gres, "used": "gpu:0"}}
        for names, gres in entries
    ]
    return json.dumps({"sinfo": found, "meta": {}, "errors": []})


def programs(**output: str) -> Any:
    return lambda command: output.get(command[0])


def shape(cluster: Cluster) -> list[tuple[int, int, str]]:
    return [(g.nodes, g.devices_per_node, g.device.name) for g in cluster.groups]


def test_slurm_job_of_equal_nodes() -> None:
    run = programs(scontrol=scontrol(*["gpu:h100:8(S:0-1)"] * 4))
    cluster = managers.slurm(JOB, run, found=[])
    assert shape(cluster) == [(4, 8, "H100-SXM-80GB")]
    assert "4711" in cluster.source
    assert cluster.groups[0].inter_node is not None


def test_number_of_nodes() -> None:
    assert managers.num_nodes({}) == 1
    assert managers.num_nodes(JOB) == 4
    assert managers.num_nodes({"SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}) == 3
    assert managers.num_nodes({"PET_NNODES": "2:6"}) == 6


def test_slurm_job_with_part_of_a_node() -> None:
    env = {**JOB, "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    assert shape(managers.slurm(env, programs(scontrol=scontrol("gpu:a100:8")), found=[])) == [(1, 2, "A100-SXM-80GB")]


def test_slurm_node_is_believed_over_the_manager() -> None:
    cluster = managers.slurm(JOB, programs(scontrol=scontrol(*["gpu:8(S:0-1)"] * 4)), found=[H100] * 8)
    assert shape(cluster) == [(4, 8, "H100-SXM-80GB")]


def test_slurm_job_of_unequal_nodes() -> None:
    run = programs(scontrol=scontrol("gpu:h100:8", "gpu:h100:8", "gpu:a100:4(IDX:0-3)", "gpu:a100:4"))
    cluster = managers.slurm(JOB, run, found=[H100] * 8)
    assert shape(cluster) == [(2, 8, "H100-SXM-80GB"), (2, 4, "A100-SXM-80GB")]
    assert len(cluster.links) == 1


def test_sinfo_when_scontrol_does_not_answer() -> None:
    text = sinfo((["gpu01", "gpu02"], "gpu:l4:8"), (["gpu03", "gpu04"], "gpu:l4:8"), (["gpu01"], "gpu:l4:8"))
    cluster = managers.slurm(JOB, programs(sinfo=text), found=[])
    assert shape(cluster) == [(4, 8, "L4-24GB")]


def test_slurm_takes_the_kind_of_network_that_the_nodes_own_cards_are(monkeypatch: pytest.MonkeyPatch) -> None:
    text = scontrol(*["gpu:h100:8"] * 4)
    for kind, latency_us in ((None, 4.0), ("efa", 24.7)):
        monkeypatch.setattr(managers.sense, "network_kind", lambda kind=kind: kind)
        (group,) = managers.slurm(JOB, programs(scontrol=text), found=[]).groups
        assert group.inter_node is not None
        assert group.inter_node.latency_s * 1e6 == pytest.approx(latency_us)


def test_slurm_job_without_gpus_uses_cores_and_the_nodes_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}
    monkeypatch.setattr(managers.sense, "network_gbps", lambda: 25.0)
    (group,) = managers.slurm(env, programs(), found=[]).groups
    assert (group.nodes, group.device.name) == (2, "cpu")
    assert group.inter_node is not None
    assert group.inter_node.bandwidth_bytes_per_s == 25e9 / 8
    monkeypatch.setattr(managers.sense, "network_gbps", lambda: None)
    with pytest.raises(BadInput, match="of one node per direction, such as slurm@100"):
        managers.slurm(env, programs(), found=[])


@pytest.mark.parametrize(
    ("env", "output", "words"),
    [
        ({}, {}, "SLURM_JOB_ID is not set"),
        (JOB, {}, "does not say which GPUs"),
        (JOB, {"scontrol": scontrol(*["gpu:8"] * 4)}, "does not say which GPUs"),
        (JOB, {"scontrol": scontrol(*["gpu:gaudi2:8"] * 4)}, "'gaudi2', which is not in the catalogue"),
        (JOB, {"scontrol": scontrol(*["gpu:h100:4,gpu:t4:2"] * 4)}, "several kinds"),
        (JOB, {"scontrol": "slurm_load_node error"}, "did not print JSON"),
    ],
)
def test_slurm_refuses(env: dict[str, str], output: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        managers.slurm(env, programs(**output), found=[])


def node(
    product: str | None, count: int, *, ready: str = "True", cordoned: bool = False, mib: int | None = None
) -> dict:
    labels = {"kubernetes.io/arch": "amd64"}
    if product:
        labels["nvidia.com/gpu.product"] = product
    if mib:
        labels["nvidia.com/gpu.memory"] = str(mib)
    offered = {"cpu": "191", "memory": "2113Gi", "nvidia.com/gpu": str(count)}
    return {
        "metadata": {"name": "worker", "labels": labels},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {
            "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}],
            "capacity": {**offered, "nvidia.com/gpu": "8"},
            "allocatable": offered,
        },
    }


def kubectl(*items: dict) -> Any:
    return programs(kubectl=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)}))


def test_kubernetes_nodes() -> None:
    run = kubectl(
        node("NVIDIA-H100-80GB-HBM3", 8, mib=81559),
        node("NVIDIA-H100-80GB-HBM3", 8, mib=81559),
        node("NVIDIA-H100-80GB-HBM3", 8, mib=81559, ready="Unknown"),
        node("NVIDIA-H100-80GB-HBM3", 8, mib=81559, cordoned=True),
        node(None, 0),
        node("NVIDIA-A100-SXM4-40GB", 4),
    )
    assert shape(managers.kubernetes({}, run, found=[])) == [(2, 8, "H100-SXM-80GB"), (1, 4, "A100-SXM-40GB")]


@pytest.mark.parametrize(
    ("nodes", "per_node", "expected"), [("4", "8", (4, 8)), ("2:6", "auto", (6, 2)), ("3", "gpu", (3, 2))]
)
def test_kubernetes_job(nodes: str, per_node: str, expected: tuple[int, int]) -> None:
    env = {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": per_node}
    assert shape(managers.kubernetes(env, programs(), found=[H100] * 2)) == [(*expected, "H100-SXM-80GB")]


@pytest.mark.parametrize(
    ("env", "run", "words"),
    [
        ({}, programs(), "not inside a training job"),
        ({}, kubectl(node(None, 0)), "no node that is ready"),
        ({}, kubectl(node("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 7)), "parts of GPUs"),
        ({}, kubectl(node("NVIDIA-A30", 8)), "'NVIDIA-A30', which is not in the catalogue"),
        ({"PET_NNODES": "many"}, programs(), "PET_NNODES = 'many'"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "xpu"}, programs(), "PET_NPROC_PER_NODE = 'xpu'"),
    ],
)
def test_kubernetes_refuses(env: dict[str, str], run: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        managers.kubernetes(env, run, found=[])


def test_resolve_asks_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(BadInput, match="not inside a Slurm job"):
        Cluster.resolve("slurm")


def test_slurm_without_json_shows_lines() -> None:
    """Debian's Slurm 22.05 knows no --json."""
    lines = "".join(
        f"NodeName=n{i} Arch=x86_64 Gres=gpu:{kind}:8(S:0-1) NodeAddr=n{i}\n"
        for i, kind in enumerate(["h100"] * 2 + ["a100"] * 2)
    )

    def run(command: list[str]) -> str | None:
        return lines if command[0] == "scontrol" and "--json" not in command else None

    assert shape(managers.slurm(JOB, run, found=[])) == [(2, 8, "H100-SXM-80GB"), (2, 8, "A100-SXM-80GB")]


def test_slurm_nodes_without_gpus_have_the_cores_of_the_job() -> None:
    env = {**JOB, "SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "0"}
    cluster = managers.slurm(env, programs(), found=[], gbps=10)
    assert shape(cluster) == [(4, 1, "cpu")]
    network = cluster.groups[0].inter_node
    assert network is not None
    assert network.bandwidth_bytes_per_s == 10e9 / 8


def test_the_network_of_a_managers_nodes_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**JOB, "SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(managers, "gpus", list)
    monkeypatch.setattr(managers.sense, "network_gbps", lambda: None)
    with pytest.raises(BadInput, match=r"such as slurm@100"):
        Cluster.resolve("slurm")
    assert Cluster.resolve("slurm@40").num_devices == 4
    with pytest.raises(BadInput, match=r"'slurm@fast': after @ the Gb/s"):
        Cluster.resolve("slurm@fast")
