"""Clusters from a workload manager: the Slurm job this process is in, the Kubernetes job or cluster it can see.

Both find kinds of nodes (a device, how many on a node, how many nodes) and describe them to parse.py; the functions
that read a program's output take its text, so that they are tested on recorded output.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ahp.cluster import catalogue, local, parse, sense
from ahp.cluster.domains import hosts_per_domain
from ahp.cluster.gpus import Gpu, gpus
from ahp.cluster.model import Cluster
from ahp.errors import BadInput

Run = Callable[[list[str]], str | None]
"""Runs a program and returns its standard output; None when it is not there or fails."""

COMMAND_TIMEOUT_S = 30
_GRES_GPU = re.compile(r"\bgpu(?::(?P<type>[^:,()]+))?:(?P<count>\d+)")
_AMD_PRODUCT, _NVIDIA_PRODUCT = "amd.com/gpu.product-name", "nvidia.com/gpu.product"
_NVLINK_CLIQUE = "nvidia.com/gpu.clique"
"""Label of a node: the cluster and the clique of its NVLink fabric (NVIDIA's DRA driver and GPU feature discovery)."""
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True)
class Node:
    """What a manager reports about one node."""

    gpu: str | None
    """The manager's name for the device; None = it does not say."""
    count: int
    """GPUs that can be used; 0 = none."""
    memory_bytes: int | None = None
    """Memory of one GPU."""
    domain: str | None = field(default=None, compare=False)
    """Shared by the nodes that NVLink may join: a block of Slurm's topology, a clique of Kubernetes' labels; None = not known."""


def slurm(
    environment: Mapping[str, str] | None = None,
    run: Run | None = None,
    found: list[Gpu] | None = None,
    gbps: float | None = None,
) -> Cluster:
    """The nodes of the Slurm job that this process is in.

    The arguments replace ``os.environ``, running ``scontrol`` and ``sinfo``, and this node's own GPUs. ``gbps``: the network of one node
    per direction, as the user gives it.
    Raises BadInput outside a job, or when nothing says which GPUs the nodes have.
    """
    env = os.environ if environment is None else environment
    run = run or _run
    if "SLURM_JOB_ID" not in env:
        raise BadInput(
            "cluster = 'slurm': not inside a Slurm job (SLURM_JOB_ID is not set); start through sbatch, srun or "
            "salloc, or describe the cluster, such as 8x8xH100-SXM-80GB"
        )
    total = num_nodes(env)
    nodes = _slurm_nodes(env.get("SLURM_JOB_NODELIST", ""), total, run)
    here = gpus() if found is None else found
    if len(set(nodes)) <= 1:
        # All nodes are equal: the job's share of a node, and what this node reports about itself, hold for all.
        first = nodes[0] if nodes else Node(None, 0)
        given = _integer(env, "SLURM_GPUS_ON_NODE")
        count = given if given is not None else len(here) or first.count
        nodes = [_as_seen(first.gpu, count, here)] * total
    if blocks := _slurm_blocks(env.get("SLURM_JOB_NODELIST", ""), total, run):
        nodes = [replace(node, domain=block) for node, block in zip(nodes, blocks, strict=True)]
    return _describe(
        nodes, "slurm", f"Slurm job {env['SLURM_JOB_ID']}", on_a_node=True, cores=cores_given(env), gbps=gbps
    )


def num_nodes(environment: Mapping[str, str] | None = None) -> int:
    """Nodes of the Slurm or Kubernetes job that this process is in; 1 outside of both."""
    env = os.environ if environment is None else environment
    if "SLURM_JOB_ID" in env:
        return _integer(env, "SLURM_JOB_NUM_NODES") or _integer(env, "SLURM_NNODES") or 1
    return _pet_nodes(env["PET_NNODES"]) if "PET_NNODES" in env else 1


def _slurm_nodes(node_list: str, total: int, run: Run) -> list[Node]:
    """The job's nodes as Slurm's own programs show them; empty if none answers."""
    if not node_list:
        return []
    text = run(["scontrol", "show", "node", node_list, "--json"])
    nodes = parse_scontrol(text) if text else []
    if len(nodes) == total:
        return nodes
    text = run(["sinfo", "--nodes", node_list, "--Node", "--json"])
    nodes = parse_sinfo(text) if text else []
    if len(nodes) == total:
        return nodes
    # Slurm writes JSON only if it was built with it: Debian's 22.05 was not.
    text = run(["scontrol", "show", "node", node_list, "--oneliner"])
    nodes = parse_lines(text) if text else []
    return nodes if len(nodes) == total else []


def _slurm_blocks(node_list: str, total: int, run: Run) -> list[str]:
    """The topology block of each of the job's nodes, in their order; empty if Slurm knows no blocks (topology/block)."""
    text = run(["scontrol", "show", "topology"]) if node_list and total > 1 else None
    block_of = {}
    for name, nodes in re.findall(r"^BlockName=(\S+).*?\bNodes=(\S+)", text or "", re.M):
        block_of |= dict.fromkeys((run(["scontrol", "show", "hostnames", nodes]) or "").split(), name)
    names = (run(["scontrol", "show", "hostnames", node_list]) or "").split() if block_of else []
    blocks = [block_of[name] for name in names if name in block_of]
    return blocks if len(blocks) == total else []


def parse_lines(text: str) -> list[Node]:
    """Nodes in the output of ``scontrol show node NAMES --oneliner``."""
    return [_from_gres(gres) for gres in re.findall(r"^NodeName=.*?\bGres=(\S+)", text, re.M)]


def cores_given(environment: Mapping[str, str] | None = None) -> int:
    """Cores of this node that workers can have for themselves: its physical cores, or fewer if Slurm gave the job fewer."""
    env = os.environ if environment is None else environment
    return min(sense.physical_cores(), _integer(env, "SLURM_CPUS_ON_NODE") or sense.physical_cores())


def parse_scontrol(text: str) -> list[Node]:
    """Nodes in the output of ``scontrol show node NAMES --json``."""
    return [_from_gres(node.get("gres", "")) for node in _json(text, "scontrol").get("nodes", [])]


def parse_sinfo(text: str) -> list[Node]:
    """Nodes in the output of ``sinfo --json``: an entry can stand for several nodes, and a node has one for each partition."""
    by_name: dict[str, Node] = {}
    for entry in _json(text, "sinfo").get("sinfo", []):
        node = _from_gres(entry.get("gres", {}).get("total", ""))
        for name in entry.get("nodes", {}).get("nodes", []):
            by_name[name] = node
    return list(by_name.values())


def _from_gres(gres: str) -> Node:
    """``gpu:h100:8(S:0-1)``, ``gpu:8``, ``(null)``; entries of one type add up."""
    found = list(_GRES_GPU.finditer(gres))
    types = {match["type"] for match in found}
    if len(types) > 1:
        raise BadInput(f"cluster = 'slurm': a node has GPUs of several kinds ({gres}); ask Slurm for one kind")
    return Node(gpu=types.pop() if types else None, count=sum(int(match["count"]) for match in found))


def kubernetes(
    environment: Mapping[str, str] | None = None,
    run: Run | None = None,
    found: list[Gpu] | None = None,
    gbps: float | None = None,
) -> Cluster:
    """The Kubernetes job that this process is in (Kubeflow's PET_* variables), else the GPU nodes that kubectl shows.

    The arguments replace ``os.environ``, running ``kubectl``, and this pod's own GPUs. Raises BadInput if there is
    neither.
    """
    env = os.environ if environment is None else environment
    if "PET_NNODES" in env:
        return _kubernetes_job(env, gpus() if found is None else found, gbps)
    text = (run or _run)(["kubectl", "get", "nodes", "-o", "json"])
    if text is None:
        raise BadInput(
            "cluster = 'kubernetes': not inside a training job (PET_NNODES is not set) and 'kubectl get nodes' does not "
            "answer; start through a TrainJob, or describe the cluster, such as 8x8xH100-SXM-80GB"
        )
    nodes = parse_kubectl(text)
    if not nodes:
        raise BadInput(
            "cluster = 'kubernetes': no node that is ready and may be used offers GPUs (nvidia.com/gpu, amd.com/gpu)"
        )
    return _describe(nodes, "kubernetes", "kubectl get nodes", on_a_node=False, gbps=gbps)


def _kubernetes_job(env: Mapping[str, str], here: list[Gpu], gbps: float | None) -> Cluster:
    total = _pet_nodes(env["PET_NNODES"])
    given = env.get("PET_NPROC_PER_NODE", "auto")
    if given.isdigit():
        count = int(given)
    elif given in ("auto", "gpu", "cpu"):
        count = 0 if given == "cpu" else len(here)
    else:
        raise BadInput(f"PET_NPROC_PER_NODE = {given!r}: must be a number, auto, gpu or cpu")
    nodes = [_as_seen(None, count, here)] * total
    return _describe(nodes, "kubernetes", "Kubernetes training job", on_a_node=True, gbps=gbps)


def _pet_nodes(given: str) -> int:
    """Number of nodes in torchrun's notation: ``4``, or ``2:4`` for an elastic job, which may get fewer; plan for the most."""
    low, _, high = given.partition(":")
    words = high or low
    if not words.isdigit() or int(words) < 1:
        raise BadInput(f"PET_NNODES = {given!r}: must be a number of nodes, or MIN:MAX")
    return int(words)


def parse_kubectl(text: str) -> list[Node]:
    """Nodes with GPUs in the output of ``kubectl get nodes -o json`` that are ready and accept pods."""
    nodes = []
    for item in _json(text, "kubectl").get("items", []):
        status, labels = item.get("status", {}), item.get("metadata", {}).get("labels", {})
        ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions", []))
        if item.get("spec", {}).get("unschedulable") or not ready:
            continue
        offered = status.get("allocatable") or status.get("capacity", {})
        count = sum(int(offered.get(resource, 0)) for resource in _GPU_RESOURCES)
        if not count:
            continue
        product = labels.get(_NVIDIA_PRODUCT) or labels.get(_AMD_PRODUCT)
        if product and ("-MIG-" in product or product.endswith("-SHARED")):
            name = item.get("metadata", {}).get("name")
            raise BadInput(f"cluster = 'kubernetes': node {name!r} offers parts of GPUs ({product}), not whole ones")
        mib = labels.get("nvidia.com/gpu.memory")
        memory_bytes = int(mib) * catalogue.MIB_BYTES if mib and mib.isdigit() else None
        nodes.append(Node(product, count, memory_bytes, labels.get(_NVLINK_CLIQUE)))
    return nodes


def _as_seen(name: str | None, count: int, here: list[Gpu]) -> Node:
    """A node described by this node's own GPUs, which say more than the manager's name for them."""
    if count and here:
        gpu = local.alike(here)
        return Node(gpu.name, count, gpu.memory_bytes)
    return Node(name, count)


def _describe(
    nodes: list[Node],
    manager: str,
    source: str,
    *,
    on_a_node: bool,
    cores: int | None = None,
    gbps: float | None = None,
) -> Cluster:
    """Equal nodes become a group; several groups are connected by the slower of their networks. ``cores``: of a node without GPUs."""
    kinds = Counter(nodes)
    groups = []
    for index, (node, count) in enumerate(kinds.items()):
        device = _device(node, manager)
        # If no network is usual for the device, a node of the job can ask its own network cards.
        usual = catalogue.find(device).nic_gbps is not None
        network = gbps or (None if usual or count == 1 or not on_a_node else sense.network_gbps())
        kind = sense.network_kind() if count > 1 and on_a_node and device != catalogue.CPU else None
        if len(nodes) > 1 and not usual and network is None:
            raise BadInput(
                f"cluster = {manager!r}: {len(nodes)} nodes, and neither the catalogue nor this node's cards say how fast their network is; "
                f"give the Gb/s of one node per direction, such as {manager}@100"
            )
        groups.append(
            {
                "name": "nodes" if len(kinds) == 1 else f"{device}-{index}",
                "nodes": count,
                "devices_per_node": node.count or cores or sense.physical_cores(),
                "device": device,
                "inter_node_gbps": network,
                "inter_node_network": kind,
                "devices_per_nvlink_domain": _domain([one for one in nodes if one == node], device),
            }
        )
    description: dict[str, Any] = {"groups": groups} if len(groups) > 1 else groups[0]
    cluster = parse.from_dict(description, manager)
    return cluster.model_copy(update={"source": f"{source}; devices and links from the catalogue, not measured"})


def _domain(alike: Sequence[Node], device: str) -> int | None:
    """Devices in an NVLink domain of equal nodes; None unless their NVLink leaves the node and the manager says which are together."""
    if catalogue.find(device).devices_per_nvlink_domain is None or any(node.domain is None for node in alike):
        return None
    hosts = Counter(node.domain for node in alike)
    return hosts_per_domain(list(hosts.values())) * alike[0].count


def _device(node: Node, manager: str) -> str:
    if node.count == 0:
        return catalogue.CPU
    if node.gpu is None:
        raise BadInput(
            f"cluster = {manager!r}: {manager} does not say which GPUs the nodes have, and none can be seen from here; "
            "describe the cluster, such as 8x8xH100-SXM-80GB"
        )
    entry = catalogue.match(node.gpu, node.memory_bytes) if node.memory_bytes else catalogue.lookup(node.gpu)
    if entry is None:
        raise BadInput(
            f"cluster = {manager!r}: the nodes have {node.gpu!r}, which is not in the catalogue; "
            "measure one node with: ahp probe"
        )
    return entry.device.name


def _integer(environment: Mapping[str, str], key: str) -> int | None:
    text = environment.get(key, "")
    return int(text) if text.isdigit() else None


def _json(text: str, program: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"cluster: {program} did not print JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
