"""Where groups lie, and what collectives cost over the links between their ranks."""

import json
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.meshes import mesh_of
from ahp.cluster.model import CollectiveSample, Measurements
from ahp.cluster.parse import resolve
from ahp.forecast.communication import BASE_S, INTER_NODE_EFFICIENCY, INTRA_NODE_EFFICIENCY, Network, interpolate
from ahp.forecast.group import Group, strided_group
from ahp.forecast.mesh import PipelineAxis, axis_group, group_of, pipeline_axis, runs
from ahp.forecast.nccl import Nccl, constants
from ahp.forecast.step import simulate
from ahp.plan import DEGREE, Parallelism

from .conftest import make_cluster

MIB, GIB = 2**20, 2**30
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def network(name="cpu", **kwargs):
    """Of gloo workers unless ``name`` says otherwise."""
    return Network(make_cluster(name=name, **kwargs).groups[0])


def nccl(short):
    return Nccl(resolve(short).groups[0])


def ways(short, kind, num_bytes, group):
    return {(c.algorithm, c.protocol): c.seconds for c in nccl(short).choices(kind, num_bytes, group)}


def busbw(short, kind, num_bytes, group, algorithm=None):
    """GB/s as nccl-tests prints it."""
    seconds = min(s for (a, _), s in ways(short, kind, num_bytes, group).items() if algorithm in (None, a))
    laps = 2 if kind == "all_reduce" else 1
    return laps * (group.size - 1) / group.size * num_bytes / seconds / 1e9


def test_axes_lie_along_the_mesh():
    layout = Parallelism(
        pipeline_parallel_degree=2,
        data_parallel_replicate_degree=2,
        data_parallel_shard_degree=4,
        tensor_parallel_degree=4,
    )
    groups = {axis: axis_group(layout, axis, 8) for axis in ("tp", "dp_shard", "dp_replicate", "pp")}
    assert groups == {
        "tp": Group(4, 4, 1),
        "dp_shard": Group(4, 2, 2),  # ranks 0 4 | 8 12
        "dp_replicate": Group(2, 1, 2),
        "pp": Group(2, 1, 2),
    }
    assert strided_group(16, 1, 8) == Group(16, 8, 2)


def test_pairs_of_pipeline_places():
    # Eight places of one rank on one node, the first and the last too.
    assert PipelineAxis(8, 1, 8).pair(0, 7, 8) == Group(2, 2, 1)
    four = PipelineAxis(6, 2, 12)
    assert four.pair(3, 4, 8) == Group(2, 1, 2)
    assert four.pair(2, 3, 8) == Group(2, 2, 1)
    assert PipelineAxis(2, 8, 16).pair(0, 1, 8) == Group(2, 1, 2)


def test_axes_lie_as_mesh_order_says():
    degrees = {"pipeline_parallel_degree": 4, "data_parallel_shard_degree": 4, "tensor_parallel_degree": 2}
    layout = Parallelism(**degrees, mesh_order=("dp_shard", "pp", "tp"))
    assert axis_group(layout, "tp", 8) == Group(2, 2, 1)
    assert axis_group(layout, "dp_shard", 8) == Group(4, 1, 4)
    assert axis_group(layout, "pp", 8) == Group(4, 4, 1)
    pipeline = pipeline_axis(layout)
    assert pipeline.offsets == (0, 1, 8, 9, 16, 17, 24, 25)
    assert pipeline.pair(0, 3, 8) == Group(2, 2, 1), "a pipeline fills a node"
    usual = pipeline_axis(Parallelism(**degrees))
    assert usual.offsets == tuple(range(8))
    assert usual.pair(0, 1, 8) == Group(2, 1, 2), "a stage fills a node"


@given(st.permutations(["pp", "dp_replicate", "dp_shard", "tp"]), st.sampled_from([2, 4, 8, 16]), st.data())
def test_groups_are_those_of_the_ranks_themselves(order, per_node, data):
    """Against ranks written out: how many of a group lie on its first rank's node, and which pairs of places share one."""
    keys = {"pp": "pipeline_parallel_degree", "dp_replicate": "data_parallel_replicate_degree",
            "dp_shard": "data_parallel_shard_degree", "tp": "tensor_parallel_degree"}  # fmt: skip
    degrees = {axis: data.draw(st.sampled_from([2, 4])) for axis in order}
    layout = Parallelism(**{keys[axis]: degree for axis, degree in degrees.items()}, mesh_order=tuple(order))
    ranks = np.arange(layout.world_size).reshape([degrees[axis] for axis in order])
    for axes in (("tp",), ("dp_shard",), ("dp_replicate", "dp_shard"), ("dp_shard", "tp")):
        first = ranks[tuple(slice(None) if axis in axes else 0 for axis in order)].reshape(-1)
        local = int((first // per_node == 0).sum())
        alike = Group(first.size, local, -(-first.size // local))
        assert group_of(runs(layout, axes), per_node, layout.world_size) == alike
    places = np.moveaxis(ranks, order.index("pp"), 0).reshape(degrees["pp"], -1)
    assert sorted(places[0].tolist()) == list(pipeline_axis(layout).offsets)
    apart = (places[0] // per_node != places[1] // per_node).any()
    assert pipeline_axis(layout).pair(0, 1, per_node) == (Group(2, 1, 2) if apart else Group(2, 2, 1))


@given(st.permutations(["pp", "dp_replicate", "dp_shard", "cp", "tp"]), st.sampled_from([4, 6, 8]), st.data())
def test_no_group_reaches_further_than_the_one_that_is_priced(order, per_node, data):
    """Degrees of 3 and nodes of 6, against ranks written out: the first three neighbours share a node of 8, the third three do not."""
    degrees = {axis: data.draw(st.sampled_from([1, 2, 3, 4])) for axis in order}
    axes = tuple(axis for axis in order if degrees[axis] > 1)
    layout = Parallelism(
        **{DEGREE[axis]: degree for axis, degree in degrees.items()}, zero_stage=1, mesh_order=axes or None
    )
    ranks = np.arange(layout.world_size).reshape([degrees[axis] for axis in order])
    for axis in axes:
        nodes = np.moveaxis(ranks, order.index(axis), -1).reshape(-1, degrees[axis]) // per_node
        spread = [np.unique(group, return_counts=True)[1] for group in nodes]
        furthest = max(len(counts) for counts in spread)
        fewest = min(counts.max() for counts in spread if len(counts) == furthest)
        priced = axis_group(layout, axis, per_node)
        assert priced.nodes >= furthest
        assert priced.local <= fewest
        assert (priced.nodes == 1) == (furthest == 1)


def test_a_group_over_two_nodes_is_not_priced_as_one_within():
    layout = Parallelism(pipeline_parallel_degree=4, data_parallel_shard_degree=3, tensor_parallel_degree=2)
    assert axis_group(layout, "dp_shard", 8) == Group(3, 2, 2), "ranks 6, 8 and 10"
    assert axis_group(layout, "tp", 8) == Group(2, 2, 1)


def test_a_ring_of_cpu_workers_is_the_closed_form():
    n, latency, bandwidth = 8, 2e-6, INTRA_NODE_EFFICIENCY * 4e11
    net, group = network(), Group(8, 8, 1)
    gather = BASE_S + (n - 1) * latency + (n - 1) / n * GIB / bandwidth
    assert net.time_s("all_gather", GIB, group) == pytest.approx(gather)
    assert net.time_s("reduce_scatter", GIB, group) == pytest.approx(gather)
    assert net.time_s("all_reduce", GIB, group) == pytest.approx(2 * gather - BASE_S)


def test_cpu_groups_share_the_network_cards_of_a_node():
    narrow = network(nodes=4).time_s("all_gather", GIB, Group(4, 1, 4))
    assert narrow == pytest.approx(BASE_S + 3 * 4e-6 + 3 / 4 * GIB / (INTER_NODE_EFFICIENCY * 4e11 / 8))


@pytest.mark.parametrize("short", ["64x8xH100@3200", "64x8xA100@1600", "64x4xT4@50"])
def test_groups_share_the_network_cards_of_a_node(short):
    # One rank of each node: as many groups as devices share the cards. All ranks of each node: one group has them all.
    per_node = resolve(short).groups[0].devices_per_node
    narrow = nccl(short).time_s("all_gather", 16 * GIB, Group(16, 1, 16))
    wide = nccl(short).time_s("all_gather", 16 * GIB, Group(16 * per_node, per_node, 16))
    assert wide < narrow / (0.7 * per_node)


# NCCL 2.27.5 printed these on H100 nodes: latency in us of LL and Simple (meta-pytorch/autoparallel
# nccl_cost_model.py 0288b2ca); nodes, ranks on each.
LOGGED = [
    ("all_gather", "ring", 4, 8, (42.7, 145.6)),
    ("all_gather", "ring", 4, 1, (21.6, 50.4)),
    ("all_gather", "ring", 32, 8, (314.3, 1204.0)),
    ("all_reduce", "ring", 2, 8, (40.0, 1.4 * 131.6)),  # Simple with the plateau, which comes after the log
    ("all_reduce", "ring", 16, 2, (119.6, 1.4 * 537.2)),
    ("all_reduce", "tree", 8, 8, (45.2, 148.4)),
    ("all_reduce", "tree", 32, 1, (56.8, 148.4)),
]
EFA = {"device": "H100", "inter_node_gbps": 3200, "inter_node_network": "efa"}


@pytest.mark.parametrize(("kind", "algorithm", "nodes", "local", "latencies_us"), LOGGED)
def test_latencies_are_those_that_nccl_prints(kind, algorithm, nodes, local, latencies_us):
    """Over InfiniBand; over EFA a hop takes what was measured. LL128 is not priced between nodes."""
    found, over_efa = (
        ways(on, kind, 1e-3, Group(nodes * local, local, nodes)) for on in ("32x8xH100@3200", {"nodes": 32, **EFA})
    )
    start_us = constants()["derived"]["start_us"]["hopper"]
    for protocol, latency_us in zip(("LL", "Simple"), latencies_us, strict=True):
        assert found[algorithm, protocol] * 1e6 - start_us == pytest.approx(latency_us, abs=0.01)
    laps = 2 if kind == "all_reduce" else 1
    hops = laps * (nodes.bit_length() - 1 if algorithm == "tree" else nodes - 1)
    more_us = (over_efa[algorithm, "LL"] - found[algorithm, "LL"]) * 1e6
    assert more_us == pytest.approx(hops * (24.7 - 4.0), abs=0.01)
    assert (algorithm, "LL128") not in found


def test_long_messages_take_the_closed_form():
    """What is left over the links' own time is less than start, latency and the filling of the pipeline together."""
    derived = constants()["derived"]
    most_s = 1e-6 * (300 + derived["fill_share"] * derived["fill_us"])
    ring = derived["ring_share"]["ampere"] * 300e9
    group = Group(8, 8, 1)
    for kind, laps in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        closed = laps * 7 / 8 * 64 * GIB / ring
        assert closed < nccl("8xA100").time_s(kind, 64 * GIB, group) < closed + most_s
    in_switch = (1 + 1 / 8) * 64 * GIB / (0.85 * 0.824 * 450e9)
    assert in_switch < nccl("8xH100").time_s("all_reduce", 64 * GIB, group) < in_switch + most_s
    one_card = 64 * GIB / (0.96 * 25e9)
    assert one_card < nccl("2x8xA100@1600").time_s("send_recv", 64 * GIB, Group(2, 1, 2)) < one_card + most_s


# GB/s of bus bandwidth and a band: nccl-tests of stas00/ml-engineering 29c6b708 and VIA-Research/vTrain f8dda847,
# NVIDIA's GTC slides, bigscience 9e64edec, and the sources of benchmarks/collectives_nodes.yaml. The shares of nccl.yaml are derived from most of these
# rows together with 350 others, from none alone.
PUBLISHED = [
    ("8xA100", "all_reduce", 16 * GIB, Group(8, 8, 1), None, 234.9, 0.06),
    ("8xA100", "all_reduce", 256 * MIB, Group(4, 4, 1), None, 208.7, 0.10),
    ("8xA100", "all_to_all", 16 * GIB, Group(8, 8, 1), None, 210.0, 0.06),
    ("8xH200", "all_reduce", 16 * GIB, Group(8, 8, 1), None, 480.0, 0.05),
    ("8xH200", "all_reduce", 64 * MIB, Group(8, 8, 1), None, 346.5, 0.15),
    ("8xH200", "all_reduce", 16 * GIB, Group(8, 8, 1), "ring", 367.2, 0.05),
    ("8xH200", "all_gather", 16 * GIB, Group(8, 8, 1), None, 361.4, 0.05),
    ("8xH200", "all_reduce", 8 * GIB, Group(5, 5, 1), None, 414.2, 0.05),
    ("8xB200", "all_reduce", 8 * GIB, Group(7, 7, 1), None, 811.2, 0.05),
    ("8xV100", "all_reduce", GIB, Group(2, 2, 1), None, 22.55, 0.15),
    ("8xV100", "all_reduce", GIB, Group(3, 3, 1), None, 45.14, 0.15),
    ("8xV100", "all_reduce", GIB, Group(6, 6, 1), None, 45.74, 0.15),
    ("8xV100", "all_reduce", GIB, Group(8, 8, 1), None, 134.5, 0.15),
    ("4xV100", "all_reduce", 4e9, Group(4, 4, 1), None, 124.4, 0.06),
    ("4x8xA100@1600", "all_reduce", 16 * GIB, Group(32, 8, 4), None, 192.0, 0.05),
    ("4x8xH200@3200", "all_reduce", 4 * GIB, Group(32, 8, 4), None, 364.9, 0.05),
    ({"nodes": 16, **EFA}, "all_reduce", 64 * MIB, Group(128, 8, 16), None, 92.4, 0.25),
    ({"nodes": 16, **EFA}, "all_reduce", 256 * MIB, Group(128, 8, 16), None, 148.1, 0.25),
    ({"nodes": 32, **EFA}, "all_reduce", 2 * GIB, Group(256, 8, 32), None, 269.5, 0.15),
    ({"nodes": 32, **EFA}, "all_gather", 32 * MIB, Group(256, 8, 32), None, 12.38, 0.25),
    ({"nodes": 32, **EFA}, "all_gather", 2 * GIB, Group(256, 8, 32), None, 262.8, 0.15),
    ("4x8xB200@3200", "all_reduce", 16 * GIB, Group(32, 8, 4), None, 381.8, 0.05),
    ("32x4xV100-SXM-16GB@200", "all_reduce", 8 * MIB, Group(128, 4, 32), None, 10.01, 0.15),
    ("2x8xH100@3200", "all_reduce", 64 * MIB, Group(16, 8, 2), None, 263.7, 0.08),
    ("8x8xH100@3200", "all_reduce", 512 * MIB, Group(64, 8, 8), None, 300.5, 0.12),
    ("4x8xH100@3200", "all_gather", 32 * MIB, Group(32, 8, 4), None, 105.2, 0.20),
    ("64x1xA100-SXM-64GB@100", "all_gather", 16 * MIB, Group(64, 1, 64), "ring", 7.75, 0.15),
    ("4x8xH100@3200", "all_to_all", 16 * GIB, Group(32, 8, 4), None, 48.0, 0.12),
    ("8xA100-PCIe-80GB", "all_reduce", 16 * GIB, Group(8, 8, 1), None, 24.0, 0.05),
]


@pytest.mark.parametrize(("short", "kind", "size", "group", "algorithm", "measured", "band"), PUBLISHED)
def test_published_bandwidths(short, kind, size, group, algorithm, measured, band):
    assert busbw(short, kind, size, group, algorithm) == pytest.approx(measured, rel=band)


def test_the_switch_adds_up_where_there_is_one():
    whole = Group(8, 8, 1)
    assert ("nvls", "Simple") in ways("8xH100", "all_reduce", GIB, whole)
    for short in ("8xA100", "8xH100-PCIe-80GB", "8xMI300X"):
        assert {algorithm for algorithm, _ in ways(short, "all_reduce", GIB, whole)} == {"ring", "tree"}
    # NCCL leaves it out for less than three devices of a node (src/transport/nvls.cc, ncclNvlsInit).
    assert ("nvls", "Simple") in ways("8xH100", "all_reduce", GIB, Group(3, 3, 1))
    assert ("nvls", "Simple") not in ways("8xH100", "all_reduce", GIB, Group(2, 2, 1))
    assert ("nvls_tree", "Simple") not in ways("4x8xH100@3200", "all_reduce", GIB, Group(8, 2, 4))
    for nodes, group in ((1, Group(4, 4, 1)), (2, Group(8, 4, 2))):
        on = [
            {"nodes": nodes, "devices_per_node": 4, "device": "H100", "nvlink_switch": said} for said in (None, False)
        ]
        sums = [any(a.startswith("nvls") for a, _ in ways(cluster, "all_reduce", GIB, group)) for cluster in on]
        assert sums == [True, False]


def test_cards_of_two_nodes_send_each_byte_of_a_tree_once():
    """Each node is the root of the tree of one half, and a leaf of the other tree. On more nodes a card sends twice as much."""
    two, four, eight = (
        ways(f"{nodes}x4xV100-SXM-16GB@200", "all_reduce", 4 * GIB, Group(4 * nodes, 4, nodes))["tree", "Simple"]
        for nodes in (2, 4, 8)
    )
    assert four == pytest.approx(2 * two, rel=0.01)
    assert eight == pytest.approx(four, rel=0.01)


def test_large_groups_leave_the_ring():
    flat = Group(16384, 8, 2048)
    found = ways("2048x8xH100@3200", "all_reduce", 256 * MIB, flat)
    assert found["ring", "Simple"] > 0.217  # cost model, section 3.7
    assert min(found.values()) < 0.01
    one_each = ways("2048x8xH100@3200", "all_gather", 16 * MIB, Group(2048, 1, 2048))
    assert min(one_each, key=one_each.__getitem__) == ("pat", "Simple")
    assert ("pat", "Simple") not in ways("2048x8xH100@3200", "all_gather", 16 * MIB, flat)


def test_ordinary_ethernet_carries_less_and_answers_later():
    group = Group(4, 1, 4)
    nodes = {"nodes": 4, "devices_per_node": 1, "device": "A100-PCIe-80GB", "inter_node_latency_us": 4}
    slow, fast = (ways({**nodes, "inter_node_gbps": gbps}, "all_gather", GIB, group) for gbps in (80, 100))
    assert slow["ring", "Simple"] / fast["ring", "Simple"] == pytest.approx(100 * 0.96 / (80 * 0.8), rel=0.01)
    little = [ways({**nodes, "inter_node_gbps": gbps}, "all_gather", 1e-3, group)["ring", "LL"] for gbps in (80, 100)]
    assert little[0] - little[1] == pytest.approx(3 * 25e-6)


def test_a_slower_hop_that_the_user_gives_is_charged():
    nodes = resolve("4x8xH100@3200").groups[0]
    slow = nodes.inter_node.model_copy(update={"latency_s": 104e-6})
    there = Nccl(nodes.model_copy(update={"inter_node": slow}))
    group = Group(2, 1, 2)
    extra = there.time_s("send_recv", 1.0, group) - Nccl(nodes).time_s("send_recv", 1.0, group)
    assert extra == pytest.approx(2 * (104 - 4.0) * 1e-6)  # protocol Simple flushes as well


DGX1V_LINKS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1,
    (2, 6): 2, (3, 7): 2, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1,
}  # fmt: skip

MI250X_LINKS = {
    (0, 1): 4, (0, 2): 1, (0, 6): 2, (1, 3): 1, (1, 5): 1, (2, 3): 4, (2, 4): 2, (3, 7): 1, (4, 5): 4, (4, 6): 1, (5, 7): 1, (6, 7): 4,
}  # fmt: skip
"""Between the eight dies of a node: ROCm/rccl 0cbce2a7, src/graph/rome_models.cc, rome_model_74."""


def most_rings(left, cycles):
    """The largest number of cycles that use no link twice in one direction."""
    if not cycles:
        return 0
    best, first = most_rings(left, cycles[1:]), cycles[0]
    if all(left[edge] for edge in first):
        best = max(best, 1 + most_rings({e: n - (e in first) for e, n in left.items()}, cycles))
    return best


A100_LINKS = dict.fromkeys(((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)), 4)
"""Of the 12 links of each device, on a board of four."""


@pytest.mark.parametrize(
    ("device", "links_of", "count"),
    [
        *(("V100-SXM-32GB", DGX1V_LINKS, n) for n in (2, 3, 4, 6)),
        *(("MI250X", MI250X_LINKS, n) for n in (2, 4, 7, 8)),
        *(("A100-SXM-64GB", A100_LINKS, n) for n in (2, 3, 4)),
    ],
)
def test_the_rings_of_nodes_without_a_switch_are_counted_right(device, links_of, count):
    left = {}
    for (a, b), links in links_of.items():
        if max(a, b) < count:
            left[a, b] = left[b, a] = links
    rings = [tuple(zip((0, *order), (*order, 0), strict=True)) for order in permutations(range(1, count))]
    mesh = mesh_of(device, 1 + max(map(max, links_of)), None)
    assert mesh.rings[count] == most_rings(left, [ring for ring in rings if all(e in left for e in ring)])


def test_the_data_file_is_whole():
    data = constants()
    generations = set(data["generations"])
    assert generations == set(data["derived"]["ring_share"]) == set(data["derived"]["start_us"])
    assert {row["generation"] for row in data["devices"]} == generations
    assert [len(row) for row in data["tuner"]["tree_correction"]] == [24, 24, 24]


BOARD = {"devices_per_node": 4, "device": "H200"}


@pytest.mark.parametrize("kind", [*KINDS, "send_recv"])
@pytest.mark.parametrize(("size", "share"), [(2, 1 / 3), (3, 2 / 3), (4, 1.0)])
def test_a_group_on_a_board_of_four_has_the_links_between_its_members(kind, size, share):
    """Twice 4 GiB, so that latencies fall out. A pipeline fills as behind a switch."""
    group, fill_s = (
        Group(size, size, 1),
        1e-6 * constants()["derived"]["fill_share"] * constants()["derived"]["fill_us"],
    )
    with_switch, without = ({**BOARD, "nvlink_switch": said} for said in (True, False))
    seconds = []
    for cluster in (with_switch, without):
        times = (min(s for (a, _), s in ways(cluster, kind, n * 4 * GIB, group).items() if a != "nvls") for n in (1, 2))
        first, second = times
        seconds.append(second - first)
    assert seconds[0] == pytest.approx(share * seconds[1], abs=fill_s, rel=0.01)
    assert ways(BOARD, kind, GIB, group) == ways(with_switch, kind, GIB, group), "what is not said is as today"


def test_pairs_of_a_board_do_not_share_links():
    """The time of a pair is that of its own links, whether the other devices of the board communicate or are not even used."""
    pair = Group(2, 2, 1)
    whole, half = ({**BOARD, "devices_per_node": n, "nvlink_switch": False} for n in (4, 2))
    assert ways(whole, "all_reduce", GIB, pair) == ways(half, "all_reduce", GIB, pair)


CLUSTERS = (
    "64x8xH100@3200",
    "64x8xB200@3200",
    "64x8xA100@1600",
    "64x8xV100@400",
    "64x8xMI300X@3200",
    "64x4xT4@50",
    "64x4xA100-SXM-64GB@400",
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(CLUSTERS),
    st.sampled_from(KINDS),
    st.integers(2, 256),
    st.integers(0, 5),
    st.floats(1, 1e11),
    st.floats(1.0001, 4),
)
def test_more_bytes_never_take_less(short, kind, size, stride_exponent, num_bytes, factor):
    net = nccl(short)
    group = strided_group(size, 2**stride_exponent, resolve(short).groups[0].devices_per_node)
    assert net.time_s(kind, factor * num_bytes, group) > net.time_s(kind, num_bytes, group) > 0


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 64), st.integers(0, 5), st.floats(1, 1e10))
def test_more_bytes_never_take_less_between_cpu_workers(kind, size, stride_exponent, num_bytes):
    net, group = network(nodes=64), strided_group(size, 2**stride_exponent, 8)
    assert net.time_s(kind, 2 * num_bytes, group) > net.time_s(kind, num_bytes, group) > 0


def test_the_benchmark_prices_every_row(tmp_path):
    """A row that is the forecast itself has no error; one of a device that nobody knows is named."""
    seconds = nccl("8xA100-SXM-80GB").time_s("all_reduce", GIB, Group(8, 8, 1))
    row = {
        "id": "own", "source": "somebody/something", "hardware": "A100-SXM x8", "gpus": 8, "nodes": 1, "algo": None,
        "collective": "all_reduce", "size_bytes": GIB, "time_us": seconds * 1e6, "busbw_GBps": None, "note": None,
    }  # fmt: skip
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row, {**row, "id": "other", "hardware": "Abacus"}]))
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "collectives.py"
    result = subprocess.run([sys.executable, str(script), str(file), "--rows"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "434 of 435 rows priced" in result.stdout, "the rows of collectives_nodes.yaml and one of these"
    assert "hardware not in the catalogue: 1 rows (other)" in result.stdout
    (own,) = [line for line in result.stdout.splitlines() if line.startswith("own ")]
    assert float(own.split()[-2]) == pytest.approx(0.0, abs=0.05)


def test_one_rank_needs_no_collective():
    assert network().time_s("all_reduce", GIB, Group(1, 1, 1)) == 0.0


MEASURED = Measurements(
    collectives=tuple(
        CollectiveSample(kind="all_reduce", workers=w, bytes=size, seconds=1e-3 * w + size / 1e9)
        for w in (2, 4)
        for size in (1000, 10**6, 10**8)
    )
)


def test_measured_collectives_come_back_as_measured():
    net = network(measured=MEASURED)
    for workers in (2, 4):
        assert net.time_s("all_reduce", 10**6, Group(workers, workers, 1)) == pytest.approx(1e-3 * workers + 1e-3)
    assert net.time_s("all_reduce", 10, Group(2, 2, 1)) == pytest.approx(2e-3 + 1e-6)
    assert net.time_s("all_reduce", 10**9, Group(2, 2, 1)) == pytest.approx(10 * (2e-3 + 0.1))
    # Three ranks: the table of four (the nearest ratio), by the model's ratio of three to four.
    three, four = Group(3, 3, 1), Group(4, 4, 1)
    model = network()
    ratio = model.time_s("all_reduce", 10**8, three) / model.time_s("all_reduce", 10**8, four)
    assert net.time_s("all_reduce", 10**8, three) == pytest.approx((4e-3 + 0.1) * ratio)
    # Not measured at all: the model.
    assert net.time_s("all_gather", GIB, Group(2, 2, 1)) == network().time_s("all_gather", GIB, Group(2, 2, 1))


@given(st.floats(1, 1e12))
def test_interpolation_stays_between_its_neighbours(size):
    table = [(10.0, 1e-5), (1e4, 2e-5), (1e7, 3e-3)]
    seconds = interpolate(table, size)
    if size <= 1e7:
        assert 1e-5 <= seconds <= 3e-3 * (1 + 1e-9)
    else:
        assert seconds == pytest.approx(3e-3 * size / 1e7)


@pytest.mark.slow
def test_hosts_that_nvlink_joins_are_priced_as_what_it_joins():
    model = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 8192, "max_position_embeddings": 1024,
    }  # fmt: skip
    job = {"sequence_length": 1024, "global_batch_size": 64, "precision": "bf16"}
    apart = {
        "nodes": 64,
        "devices_per_node": 4,
        "device": "GB200-NVL72",
        "devices_per_nvlink_domain": 4,
        "inter_node_network": "efa",
    }
    for layout in (
        {"tensor_parallel_degree": 8, "data_parallel_shard_degree": 32, "zero_stage": 1},
        {"tensor_parallel_degree": 8, "data_parallel_replicate_degree": 4, "pipeline_parallel_degree": 8},
    ):
        hosts, racks, alone = (
            simulate(model=model, cluster=cluster, job=job, parallelism=layout, engine="megatron").step
            for cluster in ("64x4xGB200-NVL72", "4x64xGB200-NVL72", apart)
        )
        assert hosts == racks
        assert alone["tensor_parallel"] > 2 * hosts["tensor_parallel"]
