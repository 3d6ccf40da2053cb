"""Clusters from the short form, dicts and files; what cannot be is refused in the user's words."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster import catalogue
from ahp.cluster.model import Cluster, Device
from ahp.cluster.parse import width_words
from ahp.errors import BadInput

MIXED: dict[str, Any] = {
    "groups": [
        {"name": "new", "nodes": 2, "devices_per_node": 8, "device": "H100-SXM-80GB"},
        {"name": "old", "nodes": 4, "devices_per_node": 4, "device": "V100-SXM-32GB", "inter_node_gbps": 100},
    ],
    "links": [{"between": ["old", "new"], "gbps": 50, "latency_us": 7}],
}


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name", "gbps"),
    [
        ("8x8xH100-SXM-80GB", 8, 8, "H100-SXM-80GB", 3200),
        ("8xA100-SXM-80GB", 1, 8, "A100-SXM-80GB", None),
        ("64xA100-SXM-80GB", 8, 8, "A100-SXM-80GB", 1600),
        ("64xA100@800", 8, 8, "A100-SXM-80GB", 800),
        ("1x64xA100-SXM-80GB", 1, 64, "A100-SXM-80GB", None),
        ("8xT4", 1, 8, "T4-16GB", None),  # the usual node has 4, but nodes of 8 there are
        ("16xT4", 4, 4, "T4-16GB", 50),
        ("72xGB200-NVL72", 1, 72, "GB200-NVL72", None),
        ("144xGB200-NVL72", 2, 72, "GB200-NVL72", 28800),
        ("h100", 1, 1, "H100-SXM-80GB", None),
        ("4x8xRTX-4090-24GB@100", 4, 8, "RTX-4090-24GB", 100),
        ("2x4xMI300X@1600", 2, 4, "MI300X", 1600),
        ("MI300X", 1, 1, "MI300X", None),
        ("16x4xT4-16GB", 16, 4, "T4-16GB", 50),
    ],
)
def test_short_form(text: str, nodes: int, devices: int, name: str, gbps: float | None) -> None:
    (group,) = Cluster.parse(text).groups
    assert (group.nodes, group.devices_per_node, group.device.name) == (nodes, devices, name)
    if gbps is None:
        assert group.inter_node is None
    else:
        assert group.inter_node is not None
        assert group.inter_node.bandwidth_bytes_per_s == pytest.approx(gbps * 1e9 / 8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("64xA100", "64xA100 is read as 8 nodes of 8, the usual width; 1x64xA100 is one node"),
        ("16xT4@100", "16xT4@100 is read as 4 nodes of 4, the usual width; 1x16xT4@100 is one node"),
        ("8xA100", None),
        ("1x64xA100", None),
        ("8x8xA100", None),
        ("64xcpu", None),
        ("8xH100+64xA100", "64xA100 is read as 8 nodes of 8, the usual width; 1x64xA100 is one node"),
        ("A100", None),
        ("MI300X", None),
        ("local", None),
        ("cluster.yaml", None),
    ],
)
def test_a_width_that_is_taken_is_said(text: str, told: str | None) -> None:
    assert width_words(text) == told


def test_devices_that_are_no_whole_nodes_are_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"nodes of 8, .* \(valid: 16xA100, 24xA100, 1x20xA100\)"):
        Cluster.parse("20xA100")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("8xH100-SXM-80GB+8xA100-SXM-80GB", [("h100", 1, 8), ("a100", 1, 8)]),
        ("64xH100 + 2x4xL4@50", [("h100", 8, 8), ("l4", 2, 4)]),
        ("8xH100+4xH100+a100", [("h100-1", 1, 8), ("h100-2", 1, 4), ("a100", 1, 1)]),
        ("RTX 4090@100+MI300X@400", [("rtx-4090", 1, 1), ("mi300x", 1, 1)]),
    ],
)
def test_groups_joined_in_a_short_form_are_a_mixed_cluster(text: str, groups: list[tuple[str, int, int]]) -> None:
    cluster = Cluster.parse(text)
    assert [(group.name, group.nodes, group.devices_per_node) for group in cluster.groups] == groups
    described = [
        {"name": name, "nodes": nodes, "devices_per_node": devices, "device": group.device.name}
        | ({"inter_node_gbps": float(part.split("@")[1])} if "@" in part else {})
        for (name, nodes, devices), group, part in zip(groups, cluster.groups, text.split("+"), strict=True)
    ]
    assert cluster == Cluster.from_dict({"groups": described}, cluster.source)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH100+", "each side of \\+"),
        ("8xH100+8xH1OO-SXM-80GB", "not in the catalogue.*H100-SXM-80GB"),
        ("8xH100+12xA100", r"valid: 8xA100, 16xA100, 1x12xA100"),
        ("8xH100+2xRTX 4090", "in the short form @100 after RTX-4090-24GB, which has no usual network"),
    ],
)
def test_a_group_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Cluster.parse(text)


def test_files_that_are_no_clusters(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cluster = 8: must be a text"):
        Cluster.parse(8)  # pyright: ignore[reportArgumentType]
    file = tmp_path / "plan.yaml"
    file.write_text("job: {}\ncluster: {device: H100}\n")
    with pytest.raises(BadInput, match=r"plan.yaml': a plan or a config, not a cluster"):
        Cluster.resolve(file)
    with pytest.raises(BadInput, match=r"device = 'tpu': not in the catalogue; .* \(nearest: "):
        Cluster.parse("8xtpu")
    with pytest.raises(BadInput, match=r"device = 'H100é': not in the catalogue; .* \(nearest: H100-SXM-80GB"):
        Cluster.parse("8xH100é")


def test_this_machine_is_timed_once() -> None:
    first, second = (Cluster.parse("2xcpu").groups[0].device.memory_bandwidth_bytes_per_s for _ in range(2))
    assert first == second, "no two timings are alike to the last digit"


@settings(deadline=None)
@given(st.integers(1, 4096), st.integers(1, 128), st.sampled_from([n for n in catalogue.names() if n != "cpu"]))
def test_short_form_counts(nodes: int, devices: int, name: str) -> None:
    cluster = Cluster.parse(f"{nodes}x{devices}x{name}@100")
    assert cluster.num_devices == nodes * devices
    assert cluster.groups[0].device.name == name


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("0x8xH100", "nodes must be a whole number of at least 1, not '0'"),
        ("2x-8xH100", "devices per node must be a whole number of at least 1, not '-8'"),
        ("1.5xH100", "not '1.5'"),
        ("8x8xH10O-SXM-80GB", "not in the catalogue.*H100-SXM-80GB"),
        ("8x8x", "not NODESxDEVICESxDEVICE"),
        ("2x8H100", r"not NODESxDEVICESxDEVICE .* \(valid: 2x8xH100\)"),
        ("H100x8", r"the numbers stand before the device, with x between \(valid: 8xH100\)"),
        ("MI300Xx2x8", r"\(valid: 2x8xMI300X\)"),
        ("8x8xH100@fast", "not 'fast'"),
        ("8x8xH100@0", "inter_node_gbps = 0.0: must be at least 1e-06"),
        ("8x8xH100@1e-300", "inter_node_gbps = 1e-300: must be at least"),
        ("8x8xH100@nan", "inter_node_gbps = nan"),
        ("2x8xRTX-3090-24GB", "inter_node_gbps is missing"),
        ("nowhere.yaml", "no such file"),
        ({"nodes": 2, "device": "H100", "inter_node_gbps": -1}, "inter_node_gbps = -1"),
        ({"nodes": 2, "device": "H100", "inter_node_gbps": float("inf")}, "inter_node_gbps = inf"),
        ({"nodes": 2, "device": "H100", "gpus": 8}, r"gpus: unknown key \(did you mean: devices_per_node\?\)"),
        ({"groupz": [{"device": "H100"}]}, r"groupz: unknown key \(did you mean: groups\?\)"),
        ({"nodes": 2}, "device"),
        ({"nodes": True, "device": "H100-SXM-80GB"}, "nodes = True: must be a whole number, not true or false"),
        ({"nodes": 1, "devices_per_node": "8", "device": "H100-SXM-80GB"}, "devices_per_node = '8': .* not text"),
        ({"nodes": 10**30, "device": "H100-SXM-80GB"}, "nodes = 1000.*1000000"),
        ("1x99999999xH100-SXM-80GB", "devices_per_node = 99999999: .*10000"),
        ("99999999xH100-SXM-80GB", "nodes of 8, and this number does not fill whole nodes"),
        ({"device": {"base": "H100", "memory_gb": 80}}, "memory_gb: unknown key .*memory_bytes"),
        ({"device": {"base": "H100", "memory_bytes": 0}}, "memory_bytes = 0"),
        ({"device": {"base": "H100", "memory_bytes": 80}}, "memory_bytes = 80: must be at least 100000000"),
        ({"device": {"base": "H1000"}}, r"device.base = 'H1000'"),
        (
            {"nodes": 2, "device": "H100", "inter_node_network": "ib"},
            "inter_node_network = 'ib'.*valid: infiniband, efa, slingshot, ethernet",
        ),
        ({"device": "H100", "inter_node_network": "efa"}, "inter_node_network = 'efa': a single node without"),
        (
            {"nodes": 2, "device": "H100", "inter_node_network": "efa", "inter_node_latency_us": 3},
            "inter_node_network = 'efa': .*and so does inter_node_latency_us: give only one",
        ),
        (
            {"nodes": 2, "device": "cpu", "inter_node_gbps": 10, "inter_node_network": "efa"},
            "gloo over TCP; leave it out",
        ),
        ({"groups": []}, "groups"),
        (
            {**MIXED, "links": [{"between": ["new", "newer"], "gbps": 50}]},
            "cluster: links.between = 'newer'.*valid: new, old",
        ),
        ({**MIXED, "links": [{"between": ["new", "new"], "gbps": 50}]}, "two different groups"),
        ({**MIXED, "links": [{"between": ["new", "old"], "gbps": 0}]}, "gbps = 0"),
        ({"groups": [MIXED["groups"][0], MIXED["groups"][0]]}, "its own name"),
        (8, "must be a Cluster"),
    ],
)
def test_refused(what: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Cluster.resolve(what)


def test_a_network_with_the_users_latency() -> None:
    usual = Cluster.parse("4x8xH100-SXM-80GB").groups[0].inter_node
    quick = Cluster.from_dict({"nodes": 4, "device": "H100-SXM-80GB", "inter_node_latency_us": 2})
    link = quick.groups[0].inter_node
    assert usual is not None
    assert link is not None
    assert (usual.latency_s, link.latency_s) == pytest.approx((4e-6, 2e-6))
    assert link.bandwidth_bytes_per_s == usual.bandwidth_bytes_per_s
    assert link.source.endswith("latency: given by the user")
    assert Cluster.from_dict(quick.plain()) == quick
    with pytest.raises(BadInput, match=r"inter_node_latency_us = 4\.0: a single node without inter_node_gbps"):
        Cluster.from_dict({"device": "H100-SXM-80GB", "inter_node_latency_us": 4})


@pytest.mark.parametrize(
    ("description", "latency_us"),
    [
        ({"device": "H100"}, 4.0),  # a DGX's is InfiniBand
        ({"device": "H100", "inter_node_network": "efa"}, 24.7),
        ({"device": "H100", "inter_node_gbps": 100, "inter_node_network": "ethernet"}, 24.7),
        ({"device": "MI250X"}, 13.5),  # LUMI's is Slingshot
        ({"device": "RTX-4090-24GB", "inter_node_gbps": 100}, 24.7),  # nothing says what it is
        ({"device": "RTX-4090-24GB", "inter_node_gbps": 100, "inter_node_network": "infiniband"}, 4.0),
    ],
)
def test_the_kind_of_a_network_says_how_long_a_hop_takes(description: dict[str, Any], latency_us: float) -> None:
    cluster = Cluster.from_dict({"nodes": 4, **description})
    link = cluster.groups[0].inter_node
    assert link is not None
    assert link.latency_s * 1e6 == pytest.approx(latency_us)
    kind = description.get("inter_node_network")
    assert kind is None or f"latency: {kind}, " in link.source
    assert Cluster.from_dict(cluster.plain()) == cluster


def test_device_with_the_users_figures() -> None:
    figures = {"memory_bytes": 95 * 2**30, "memory_bandwidth_bytes_per_s": 2.4e12, "power_limit_w": 500}
    (group,) = Cluster.from_dict({"nodes": 4, "device": {"base": "H100-SXM-80GB", **figures}}).groups
    device, usual = group.device, catalogue.find("H100").device
    assert {key: getattr(device, key) for key in figures} == figures
    assert device.rated_power_w == 700
    assert device.peak_flops_per_s == usual.peak_flops_per_s
    assert "given by the user" in device.source
    assert group.devices_per_node == 8


def test_a_whole_device_of_the_users() -> None:
    device = catalogue.find("A100").device.model_copy(update={"num_sms": 104})
    cluster = Cluster.from_dict({"nodes": 1, "devices_per_node": 2, "device": device.model_dump()})
    assert cluster.groups[0].device == device


def test_mixed_cluster() -> None:
    cluster = Cluster.from_dict(MIXED)
    assert cluster.is_mixed
    assert cluster.num_devices == 32
    (link,) = cluster.links
    assert link.between == ("old", "new")
    assert (link.link.bandwidth_bytes_per_s, link.link.latency_s) == (50e9 / 8, pytest.approx(7e-6))


def test_mixed_cluster_without_links_takes_the_slower_network() -> None:
    (link,) = Cluster.from_dict({"groups": MIXED["groups"]}).links
    assert link.link.bandwidth_bytes_per_s == 100e9 / 8
    assert "slower network" in link.link.source


@pytest.mark.parametrize("what", ["4x8xB200-SXM", MIXED, {"nodes": 1, "devices_per_node": 2, "device": "T4"}])
def test_file_round_trip(what: Any, tmp_path: Path) -> None:
    cluster, path = Cluster.resolve(what), tmp_path / "deep" / "cluster.yaml"
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert Cluster.resolve(str(path)) == cluster
    assert Cluster.resolve(cluster.plain()) == cluster
    assert Cluster.resolve(cluster) is cluster
    assert list(path.parent.iterdir()) == [path]


def test_file_with_a_description(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump({"nodes": 2, "devices_per_node": 4, "device": "a100", "inter_node_gbps": 200}))
    assert Cluster.load(path) == Cluster.parse("2x4xA100-SXM-80GB@200")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b", "mapping"),
        ("a: [", "not YAML"),
        ("cluster: {device: T4}", "what it has under its key cluster may be a file of its own"),
        ("nodes: 2\nnodes: 4\ndevice: T4\n", "the key 'nodes' is given twice"),
        ("schema_version: 9\ngroups: [{intra_node: 1}]", "schema_version = 9"),
    ],
)
def test_file_that_is_no_cluster(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        Cluster.load(path)


def test_a_list_with_a_wrong_value_is_not_called_too_short_as_well() -> None:
    data = Cluster.parse("2x8xH100").plain()
    with pytest.raises(BadInput, match=r"groups = .*: must have at least 1"):
        Cluster.from_dict({**data, "groups": []})
    data["groups"][0]["device"]["num_sms"] = "many"
    with pytest.raises(BadInput, match=r"device.num_sms = 'many': must be a whole number$"):
        Cluster.from_dict(data)


def test_plain_form_is_checked(tmp_path: Path) -> None:
    data = Cluster.parse("2x8xH100").plain()
    data["groups"][0]["intra_node"]["bandwidth_bytes_per_s"] = float("nan")
    with pytest.raises(BadInput, match="bandwidth_bytes_per_s"):
        Cluster.from_dict(data)
    for peaks, words in (
        ({"fp32": 0.0}, "must be 1 or more"),
        ({"fp23": 1e12}, r"fp23: .*\(valid: fp32, bf16, fp16, fp8\)"),
    ):
        with pytest.raises(ValueError, match=words):
            Device(name="x", memory_bytes=1, memory_bandwidth_bytes_per_s=1, peak_flops_per_s=peaks)
    data = Cluster.parse("2x8xH100").plain()
    data["groups"][0]["device"]["peak_flops_per_s"]["bf16"] = True
    with pytest.raises(BadInput, match=r"peak_flops_per_s.bf16 = True: must be a number"):
        Cluster.from_dict(data)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("kernel_launch_s", 1e300, "must be at most 60"),
        ("reserved_memory_bytes", 10**30, "must be at most 1000000000000000000"),
        ("power_limit_w", 5e-324, "must be at least 1"),
        ("rated_power_w", 0.5, "must be at least 1"),
    ],
)
def test_a_figure_that_no_device_has_is_refused(key: str, value: float, rule: str) -> None:
    """A forecast with it ended in an internal error."""
    data = Cluster.parse("8xH100").plain()
    data["groups"][0]["device"][key] = value
    with pytest.raises(BadInput, match=rf"device.{key} = .*: {rule}"):
        Cluster.from_dict(data)


SAMPLES = {
    "matmul": {"m": 8, "n": 8, "k": 8, "dtype": "fp32", "workers": 1, "seconds": 1e-6},
    "memory": {"workers": 1, "bytes_per_s": 1e9},
    "attention": {
        "heads": 1,
        "sequence": 8,
        "head_dim": 8,
        "dtype": "fp32",
        "workers": 1,
        "phase": "forward",
        "seconds": 1e-6,
    },
    "element_wise": {"kind": "add", "elements": 8, "dtype": "fp32", "workers": 1, "seconds": 1e-6},
    "collectives": {"kind": "all_reduce", "workers": 2, "bytes": 8, "seconds": 1e-6},
}


@pytest.mark.parametrize("table", SAMPLES)
def test_a_measurement_of_nothing_is_refused(table: str) -> None:
    """Their logarithms are asked for."""
    data = Cluster.parse("1x2xH100").plain()
    sample: dict[str, Any] = SAMPLES[table]
    data["groups"][0]["measured"] = {table: [sample]}
    assert Cluster.from_dict(data)
    for key in (key for key, value in sample.items() if not isinstance(value, str)):
        data["groups"][0]["measured"] = {table: [sample | {key: -1}]}
        with pytest.raises(BadInput, match=key):
            Cluster.from_dict(data)


def test_a_network_that_is_not_known_is_asked_for_in_the_form_that_was_written() -> None:
    with pytest.raises(BadInput) as refused:
        Cluster.parse("2x8xRTX-4090")
    form = str(refused.value).rpartition(" ")[2]
    assert form == "2x8xRTX-4090-24GB@100"
    network = Cluster.parse(form).groups[0].inter_node
    assert network is not None
    assert network.bandwidth_bytes_per_s == 12.5e9
    assert Cluster.parse("8xH100+2xRTX-4090-24GB@100").links[0].link.bandwidth_bytes_per_s == 12.5e9
