"""Hosts that are probed together: who measures with whom when, which are alike, and what links come of it. All measurements are made up."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from ahp.cluster.hosts.grouping import SAME_SPEED, Probed, as_nodes, grouped
from ahp.cluster.hosts.links import Direction, direction, joined
from ahp.cluster.hosts.rounds import MOST_ROUNDS, all_rounds, rounds
from ahp.cluster.model import Cluster, Device, Host, Link, MatmulSample, Measurements, MemorySample, NodeGroup
from ahp.errors import BadInput

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
SHAPES = [(64, 64, 64), (256, 256, 256), (1024, 1024, 256)]


def host(
    name: str, speed: float = 1.0, *, stream: float = 1.0, memory: float = 1.0, device: str = "cpu", devices: int = 1, shapes: int = 3
) -> Probed:  # fmt: skip
    """Of so many times 10 GFLOP/s and 10 GB/s; a slow one has measured the first ``shapes`` only."""
    matmul = tuple(
        MatmulSample(m=m, n=n, k=k, dtype="fp32", workers=devices, seconds=2.0 * m * n * k / (speed * 1e10) * (1 + i))
        for i, (m, n, k) in enumerate(SHAPES[:shapes])
    )
    measured = Measurements(matmul=matmul, memory=(MemorySample(workers=devices, bytes_per_s=stream * 1e10),))
    own = Device(
        name=device, memory_bytes=int(memory * 2**33), memory_bandwidth_bytes_per_s=stream * 1e10,
        peak_flops_per_s={"fp32": speed * 1e10}, source=f"probe on {name}",
    )  # fmt: skip
    nodes = NodeGroup(
        nodes=1, devices_per_node=devices, device=own, intra_node=LINK, host=Host(cores=devices), measured=measured
    )
    return Probed(name, nodes)


# rounds


@pytest.mark.parametrize("hosts", range(1, 41))
def test_every_pair_meets_once_and_no_host_is_in_two_pairs_at_once(hosts: int) -> None:
    found = all_rounds(hosts)
    assert len(found) == (0 if hosts < 2 else hosts - 1 + hosts % 2), "as few rounds as there can be"
    assert Counter(pair for pairs in found for pair in pairs) == Counter(combinations(range(hosts), 2))
    for pairs in found:
        assert max(Counter(host for pair in pairs for host in pair).values()) == 1


@pytest.mark.slow
def test_rounds_of_thousands_of_clusters() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        count = draw.randint(1, 60)
        groups = [draw.randrange(draw.randint(1, 5)) for _ in range(count)]
        found = rounds(groups)
        measured = [pair for pairs in found for pair in pairs]
        assert len(measured) == len(set(measured)), "a pair measures once, each direction in it"
        assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in found)
        if count <= MOST_ROUNDS + 1:
            assert set(measured) == set(combinations(range(count), 2))
        else:
            assert len(found) == MOST_ROUNDS
            partners = Counter(host for pair in measured for host in pair)
            assert min(partners.values()) >= MOST_ROUNDS - 1, "of an odd number one rests in a round"
        kinds = set(combinations(sorted(set(groups)), 2)) | {
            (g, g) for g, hosts in Counter(groups).items() if hosts > 1
        }
        met = {(min(groups[a], groups[b]), max(groups[a], groups[b])) for a, b in measured}
        assert met == kinds, "every pair of groups has met"


def test_more_rounds_only_where_pairs_of_groups_have_not_met() -> None:
    alone = list(range(8)) + [8] * 40
    found = rounds(alone, most=3)
    assert 3 < len(found) <= 37
    met = {frozenset((alone[a], alone[b])) for pairs in found for a, b in pairs}
    assert len(met) == 8 * 7 // 2 + 8 + 1


# groups


@pytest.mark.slow
def test_hosts_fall_into_the_groups_that_they_were_drawn_from() -> None:
    """Thousands of clusters: kinds that are far apart, hosts that differ by what one host differs from itself."""
    draw = random.Random(1)
    for _ in range(2000):
        kinds = draw.sample([1.0, 1.4, 2.0, 3.0, 6.0], draw.randint(1, 4))
        drawn = [draw.choice(kinds) for _ in range(draw.randint(1, 12))]
        hosts = [
            host(f"h{at}", speed * draw.uniform(0.95, 1.05), stream=speed * draw.uniform(0.95, 1.05), memory=draw.uniform(0.97, 1.03), shapes=draw.randint(1, 3))
            for at, speed in enumerate(drawn)
        ]  # fmt: skip
        found = grouped(hosts)
        assert {frozenset(members) for members in found} == {
            frozenset(at for at, speed in enumerate(drawn) if speed == kind) for kind in drawn
        }
        assert [drawn[members[0]] for members in found] == sorted(set(drawn), reverse=True), "the fastest first"


@pytest.mark.slow
def test_groups_do_not_depend_on_the_order_in_which_hosts_come() -> None:
    draw = random.Random(2)
    for _ in range(1000):
        hosts = [host(f"h{at}", draw.uniform(1, 2), stream=draw.uniform(1, 1.3)) for at in range(draw.randint(2, 9))]
        shuffled = draw.sample(hosts, len(hosts))
        ours = [[hosts[at].name for at in members] for members in grouped(hosts)]
        assert ours == [[shuffled[at].name for at in members] for members in grouped(shuffled)]
        for members in grouped(hosts):
            speeds = [hosts[at].nodes.device.peak_flops_per_s["fp32"] for at in members]
            assert max(speeds) / min(speeds) <= SAME_SPEED * (1 + 1e-9), "no chain of small steps"


@pytest.mark.parametrize(
    "other",
    [
        host("b", devices=2), host("b", device="H100-SXM-80GB"), host("b", 1.3), host("b", stream=0.7), host("b", memory=0.5)
    ],
    ids=["devices", "device", "products", "streams", "memory"],
)  # fmt: skip
def test_what_makes_two_hosts_differ(other: Probed) -> None:
    assert len(grouped([host("a"), other])) == 2
    assert len(grouped([host("a"), host("b", 1.05, stream=0.95)])) == 1


def test_a_group_has_the_figures_of_its_middle_host_the_least_memory_and_all_names() -> None:
    hosts = [host("c", 1.1), host("a", 1.0, memory=0.95), host("b", 1.05), host("slow", 0.5)]
    fast, slow = as_nodes(hosts, grouped(hosts))
    assert (fast.name, slow.name) == ("cpu-1", "cpu-2")
    assert (fast.nodes, fast.hosts, slow.hosts) == (3, ("a", "b", "c"), ("slow",))
    assert fast.device.peak_flops_per_s["fp32"] == pytest.approx(1.05e10)
    assert fast.device.memory_bytes == int(0.95 * 2**33)
    assert fast.device.source == "probe on b; the one in the middle of 3 hosts that are alike"
    assert as_nodes(hosts[:3], [[0, 2, 1]])[0].name == "nodes"
    gpus = [host("g", device="H100-SXM-80GB"), host("h", 0.5, device="A100-SXM-80GB")]
    assert [nodes.name for nodes in as_nodes(gpus, grouped(gpus))] == ["h100-sxm-80gb", "a100-sxm-80gb"]
    with pytest.raises(BadInput, match=r"do not compute on the same kind of devices \(g: H100-SXM-80GB, a: cpu\)"):
        as_nodes([gpus[0], host("a")], [[0], [1]])


# links


def test_a_shaped_network_is_not_taken_for_its_first_burst() -> None:
    """100 Mb/s each of two streams, 1 MB let through at once, 0.2 ms there and back."""

    def seconds(size: int) -> float:
        return 2e-4 + max(0.0, 2 * size - 1e6) / 25e6

    found = direction(0, 1, 2, {size: seconds(size) for size in (4, 2**16, 2**20, 2**24)})
    assert found.latency_s == pytest.approx(1e-4)
    assert found.bandwidth_bytes_per_s == pytest.approx(25e6, rel=0.04)


def both(a: int, b: int, there: float, back: float | None = None, latency_s: float = 1e-4) -> list[Direction]:
    back = there if back is None else back
    return [Direction(a, b, there * 1.25e8, latency_s), Direction(b, a, back * 1.25e8, latency_s)]


def test_links_within_a_group_are_its_own_and_those_between_groups_the_clusters(tmp_path) -> None:
    hosts = [host("a"), host("b"), host("c"), host("d", 0.5)]
    members = grouped(hosts)
    measured = [
        *both(0, 1, 10), *both(0, 2, 9), *both(1, 2, 11, 8), *both(0, 3, 1), *both(1, 3, 1.2), *both(2, 3, 1.1, latency_s=3e-4)
    ]  # fmt: skip
    found = joined(as_nodes(hosts, members), members, "abcd", measured, "probe of 4 hosts")
    fast, slow = found.cluster.groups
    assert fast.inter_node is not None
    assert fast.inter_node.bandwidth_bytes_per_s == pytest.approx(9 * 1.25e8), "the median pair, of each the slower way"
    assert "median of 3 pairs of hosts, each in its slower direction; 8 to 10 Gb/s" in fast.inter_node.source
    assert slow.inter_node is None
    [link] = found.cluster.links
    assert link.between == ("cpu-1", "cpu-2")
    assert link.link.bandwidth_bytes_per_s == pytest.approx(1.1 * 1.25e8)
    assert link.link.latency_s == pytest.approx(1e-4)
    assert not found.warnings
    found.cluster.save(tmp_path / "cluster.yaml")
    assert Cluster.load(tmp_path / "cluster.yaml") == found.cluster


def test_hosts_that_are_all_alike_are_a_homogeneous_cluster() -> None:
    hosts = [host("a"), host("b")]
    found = joined(as_nodes(hosts, [[0, 1]]), [[0, 1]], "ab", both(0, 1, 2), "probe of 2 hosts").cluster
    assert not found.is_mixed
    assert not found.links
    assert (found.groups[0].name, found.groups[0].nodes, found.num_devices) == ("nodes", 2, 2)
    assert found.groups[0].inter_node is not None


def test_pairs_of_one_kind_that_differ_strongly_are_named() -> None:
    hosts = [host("a"), host("b"), host("c"), host("d", 0.5)]
    members = grouped(hosts)
    measured = [*both(0, 1, 10), *both(0, 2, 10, 0.1), *both(1, 2, 10), *both(0, 3, 1), *both(1, 3, 1), *both(2, 3, 1)]
    [said] = joined(as_nodes(hosts, members), members, "abcd", measured, "").warnings
    assert "links within cpu-1 differ: the fastest has 10 Gb/s, c to a 0.1." in said
