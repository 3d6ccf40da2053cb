"""Where it runs: devices, links, groups of nodes, and the cluster that holds them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ahp.job import Record


class Device(Record):
    """One accelerator, or one worker's share of a CPU. Figures are per device."""

    name: str
    memory_bytes: int = Field(gt=0)
    memory_bandwidth_bytes_per_s: float = Field(gt=0)
    peak_flops_per_s: dict[str, float]
    """Dense peak by precision (fp32, bf16, fp16, fp8); a precision that is absent is not supported."""
    num_sms: int | None = None
    power_limit_w: float | None = None
    kernel_launch_s: float = Field(default=5.0e-6, ge=0)
    """Time that every kernel takes at least, launch included."""
    reserved_memory_bytes: int = 0
    """Held by the driver and the context before the first tensor."""
    source: str = ""


class Link(Record):
    """A level of the network. ``bandwidth`` is per direction."""

    bandwidth_bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    source: str = ""


class MatmulSample(Record):
    """A measured matrix product (m, k) x (k, n)."""

    m: int
    n: int
    k: int
    dtype: str
    workers: int
    """Workers that ran it at once on the node."""
    seconds: float


class CollectiveSample(Record):
    """A measured collective over ``workers`` ranks; ``bytes`` is the whole tensor (the gathered one for all-gather)."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    workers: int
    bytes: int
    seconds: float


class MemorySample(Record):
    """Measured streaming bandwidth of one worker while ``workers`` of them stream."""

    workers: int
    bytes_per_s: float


class Measurements(Record):
    """What probe measured on one node of a group."""

    matmul: tuple[MatmulSample, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()


class Host(Record):
    """One node beside its devices."""

    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    storage_path: str | None = None
    storage_kind: str | None = None
    storage_free_bytes: int | None = None
    storage_read_bytes_per_s: float | None = None
    storage_write_bytes_per_s: float | None = None


class NodeGroup(Record):
    """Nodes of one kind."""

    name: str = "nodes"
    nodes: int = Field(ge=1)
    devices_per_node: int = Field(ge=1)
    device: Device
    intra_node: Link
    """Between two devices of one node; bandwidth per device."""
    inter_node: Link | None = None
    """Between nodes; bandwidth of the whole node's network cards together. None for a single node."""
    host: Host = Host()
    measured: Measurements | None = None

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


class GroupLink(Record):
    """The connection between two groups of a mixed cluster; bandwidth of one node, per direction."""

    between: tuple[str, str]
    link: Link


class Cluster(Record):
    """What the job runs on. Read and written as cluster.yaml; ``Cluster.parse`` reads the short forms."""

    groups: tuple[NodeGroup, ...]
    links: tuple[GroupLink, ...] = ()
    source: str = "catalogue"
    """``catalogue``: nobody measured this cluster. ``probe``: measured, when and where."""

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def is_mixed(self) -> bool:
        return len(self.groups) > 1

    def plain(self) -> dict[str, Any]:
        """As data for YAML and JSON; ``Cluster.model_validate`` reads it back."""
        return self.model_dump(mode="json", exclude_none=True)
