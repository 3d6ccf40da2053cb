"""The hardware of a job: devices, links, groups of nodes, and the cluster that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ahp.cluster.meshes import refuse_wrong_switch
from ahp.job import BYTES_PER_ELEMENT, Record
from ahp.read_only import ReadOnlyDict

CLUSTER_SCHEMA_VERSION = 1

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=1)]
"""A rate per second. Less than 1 is no real hardware, and the reciprocal of nearly 0 is no usable time."""
Watts = Annotated[float, Field(ge=1)]
"""Power; less than 1 is no real hardware either."""


class Device(Record):
    """One accelerator, or one worker's share of a CPU. Figures are per device."""

    name: str
    memory_bytes: int = Field(gt=0)
    memory_bandwidth_bytes_per_s: Rate
    peak_flops_per_s: ReadOnlyDict[float] = Field(min_length=1)
    """Dense peak by precision (fp32, bf16, fp16, fp8); a precision that is absent is not supported."""
    num_sms: Count | None = None
    power_limit_w: Watts | None = None
    """Power limit of the device, as set on it or by the user."""
    rated_power_w: Watts | None = None
    """Power that the part is built for; ``peak_flops_per_s`` and the bandwidth are those at this power."""
    kernel_launch_s: float = Field(default=5.0e-6, ge=0, le=60)
    """The least time of any operator. On a GPU the launch of a kernel; on a CPU the time that Python, dispatch and
    autograd take for one operator of a training step, which nothing hides there."""
    host_bandwidth_bytes_per_s: Rate | None = None
    """Between its memory and the host's, one way at a time, while all devices of the node copy; None = not known."""
    reserved_memory_bytes: int = Field(default=0, ge=0, le=10**18)
    """Held by the driver and the context before the first tensor."""
    source: str = ""

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s; a precision the device has no units for computes at its fp32 peak."""
        peaks = self.peak_flops_per_s
        return peaks.get(precision) or peaks.get("fp32") or max(peaks.values())

    @model_validator(mode="after")
    def _peaks_are_rates(self) -> Device:
        for precision, peak in self.peak_flops_per_s.items():
            if precision not in BYTES_PER_ELEMENT:
                raise ValueError(
                    f"peak_flops_per_s.{precision}: no precision of a job (valid: {', '.join(BYTES_PER_ELEMENT)})"
                )
            if not peak >= 1:
                raise ValueError(
                    f"peak_flops_per_s.{precision} = {peak}: must be 1 or more; leave out what is not supported"
                )
        return self


class Link(Record):
    """A level of the network. ``bandwidth`` is per direction."""

    bandwidth_bytes_per_s: Rate
    latency_s: float = Field(ge=0)
    source: str = ""


ProductPhase = Literal["forward", "input_gradient", "weight_gradient"]
"""How the operands of a product (m, k) x (k, n) lie in memory: k is the last dim of both (forward), of the first, or of neither."""


class MatmulSample(Record):
    """A measured matrix product (m, k) x (k, n)."""

    phase: ProductPhase = "forward"
    m: Count
    n: Count
    k: Count
    dtype: str
    workers: Count
    """Workers that ran it at once on the node."""
    seconds: float = Field(gt=0)


class CollectiveSample(Record):
    """A measured collective over ``workers`` ranks; ``bytes`` is the whole tensor (the gathered one for all-gather)."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    workers: Count
    bytes: NotNegative
    seconds: float = Field(gt=0)


class AttentionSample(Record):
    """Measured causal fused attention of one sequence over ``heads`` heads (torch's scaled_dot_product_attention)."""

    heads: Count
    sequence: Count
    head_dim: Count
    dtype: str
    workers: Count
    phase: Literal["forward", "backward"]
    seconds: float = Field(gt=0)


class ElementWiseSample(Record):
    """A measured element-wise operator on ``elements`` elements.

    ``add`` reads two tensors and writes one; ``silu`` stands for all that take an exponential of every element.
    """

    kind: Literal["add", "silu"]
    elements: Count
    dtype: str
    workers: Count
    seconds: float = Field(gt=0)


class MemorySample(Record):
    """Measured streaming bandwidth of one worker while ``workers`` workers stream."""

    workers: Count
    bytes_per_s: Rate


class Measurements(Record):
    """What probe measured on one node of a group."""

    matmul: tuple[MatmulSample, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    attention: tuple[AttentionSample, ...] = ()
    element_wise: tuple[ElementWiseSample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()


class Host(Record):
    """One node apart from its devices."""

    cpu: str = ""
    cores: Count | None = None
    """Physical cores that this process can use, including container limits."""
    processors: float | None = Field(default=None, gt=0)
    """Processors' worth of time that control groups grant; None if they set no limit."""
    memory_bytes: NotNegative | None = None
    """Memory that this process can use, including container limits."""
    numa_nodes: NotNegative | None = None
    network_gbps: float | None = Field(default=None, ge=0)
    """Gb/s per direction of the node's network cards, as they report it; None if they do not."""
    storage_path: str | None = None
    storage_kind: str | None = None
    storage_free_bytes: NotNegative | None = None
    storage_read_bytes_per_s: float | None = Field(default=None, ge=0)
    storage_write_bytes_per_s: float | None = Field(default=None, ge=0)


LEAST_RATIO, MOST_RATIO = 0.01, 100
"""A step that takes less or more of its forecast is that of another plan."""


class Calibration(Record):
    """How long training runs on some nodes took, compared with their forecast."""

    step_ratio: float = Field(gt=LEAST_RATIO, lt=MOST_RATIO)
    """Seconds of a measured step divided by the forecast seconds; for several runs the geometric mean."""
    runs: Count
    source: str
    """Which runs, when and how long."""


class NodeGroup(Record):
    """Nodes of one kind."""

    name: str = "nodes"
    nodes: int = Field(ge=1, le=1_000_000)
    devices_per_node: int = Field(ge=1, le=10_000)
    devices_per_nvlink_domain: Count | None = None
    """Devices of the whole nodes that NVLink joins; None = it joins the devices of one node at most."""
    nvlink_switch: bool | None = None
    """Whether a switch joins the devices of a node; None = what is known about the device (``ahp.cluster.meshes``)."""
    device: Device
    intra_node: Link
    """Between two devices of one node, or of one domain; bandwidth per device."""
    inter_node: Link | None = None
    """Between nodes; bandwidth of the whole node's network cards together. None for a single node."""
    host: Host = Host()
    hosts: tuple[str, ...] = ()
    """The hosts' own names when they were probed together, by which a worker finds its group."""
    measured: Measurements | None = None
    calibration: Calibration | None = None
    """From ``ahp calibrate``: every forecast on these nodes is multiplied by its ratio."""

    @model_validator(mode="after")
    def _domains_are_whole_nodes(self) -> NodeGroup:
        if (self.devices_per_nvlink_domain or 0) % self.devices_per_node:
            raise ValueError(
                f"devices_per_nvlink_domain = {self.devices_per_nvlink_domain}: must be a multiple of devices_per_node "
                f"{self.devices_per_node}, or null"
            )
        return self

    @model_validator(mode="after")
    def _switch_is_possible(self) -> NodeGroup:
        domain = self.devices_per_nvlink_domain
        refuse_wrong_switch("nvlink_switch", self.nvlink_switch, self.device.name, self.devices_per_node, domain)
        return self

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def nodes_per_domain(self) -> int:
        """Nodes that NVLink joins."""
        return max(1, (self.devices_per_nvlink_domain or 0) // self.devices_per_node)


class GroupLink(Record):
    """The connection between two groups of a mixed cluster; bandwidth of one node, per direction."""

    between: tuple[str, str]
    link: Link


class Cluster(Record):
    """What the job runs on. Read and written as cluster.yaml; ``Cluster.parse`` reads the short forms."""

    schema_version: int = CLUSTER_SCHEMA_VERSION
    groups: tuple[NodeGroup, ...] = Field(min_length=1)
    links: tuple[GroupLink, ...] = ()
    """One for every pair of groups that exchange data, in either order."""
    failures_per_device_hour: float | None = Field(default=None, gt=0)
    """Failures that stop a job, per device and hour; None = the value in reliability.yaml."""
    source: str = "catalogue"
    """``catalogue``: this cluster was not measured. ``probe``: measured, when and where."""

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def is_mixed(self) -> bool:
        return len(self.groups) > 1

    def with_groups(self, groups: Iterable[NodeGroup]) -> Cluster:
        """These groups in the place of the cluster's own, with the links that it has between groups of their names."""
        found = tuple(groups)
        names = {group.name for group in found}
        links = tuple(link for link in self.links if names.issuperset(link.between))
        return self.model_copy(update={"groups": found, "links": links})

    def plain(self) -> dict[str, Any]:
        """Plain data for YAML and JSON; ``Cluster.model_validate`` reads it back."""
        return self.model_dump(mode="json", exclude_none=True)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``NODESxDEVICESxDEVICE``, such as ``8x8xH100-SXM-80GB`` or ``8xA100-SXM-80GB@400`` (see parse.py)."""
        from ahp.cluster import parse

        return parse.from_text(text)

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "cluster") -> Cluster:
        """Read a description (nodes, devices_per_node, device ...; or groups) or the plain form of a cluster."""
        from ahp.cluster import parse

        return parse.from_dict(data, where)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read cluster.yaml. Raises BadInput when the file is missing or describes no cluster."""
        from ahp.cluster import parse

        return parse.from_file(Path(path))

    @classmethod
    def resolve(cls, what: Cluster | Mapping[str, Any] | str | Path) -> Cluster:
        """A cluster from whatever names one: a cluster, a dict, a file, a short form, local, slurm, kubernetes."""
        from ahp.cluster import parse

        return parse.resolve(what)

    def save(self, path: str | Path) -> None:
        """Write cluster.yaml under another name, then rename it, so that a reader never sees half of it. Raises BadInput if it cannot be written."""
        from ahp.cluster import parse

        parse.to_file(self, Path(path))
