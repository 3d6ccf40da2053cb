"""Where groups lie, and what collectives cost over the links between their ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.model import CollectiveSample, Measurements
from ahp.forecast.communication import (
    BASE_S,
    INTER_NODE_EFFICIENCY,
    INTRA_NODE_EFFICIENCY,
    Group,
    Network,
    axis_group,
    interpolate,
    pair_group,
    strided_group,
)
from ahp.plan import Parallelism

from .conftest import make_cluster

GIB = 2**30


def network(**kwargs):
    return Network(make_cluster(**kwargs).groups[0])


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
    assert pair_group(0, 7, 1, 8) == Group(2, 2, 1)
    assert pair_group(3, 4, 2, 8) == Group(2, 1, 2)
    assert pair_group(2, 3, 2, 8) == Group(2, 2, 1)
    assert pair_group(0, 1, 8, 8) == Group(2, 1, 2)


def test_a_ring_in_one_node_is_the_closed_form():
    n, latency, bandwidth = 8, 2e-6, INTRA_NODE_EFFICIENCY * 4e11
    net, group = network(), Group(8, 8, 1)
    gather = BASE_S + (n - 1) * latency + (n - 1) / n * GIB / bandwidth
    assert net.time_s("all_gather", GIB, group) == pytest.approx(gather)
    assert net.time_s("reduce_scatter", GIB, group) == pytest.approx(gather)
    assert net.time_s("all_reduce", GIB, group) == pytest.approx(2 * gather - BASE_S)


def test_groups_share_the_network_cards_of_a_node():
    # One rank of each node: eight such groups share the cards. Eight ranks of each node: one group has them all.
    net = network(nodes=4)
    narrow = net.time_s("all_gather", GIB, Group(4, 1, 4))
    assert narrow == pytest.approx(BASE_S + 3 * 4e-6 + 3 / 4 * GIB / (INTER_NODE_EFFICIENCY * 4e11 / 8))
    wide = net.time_s("all_gather", GIB, Group(32, 8, 4))
    assert wide < narrow / 4


def test_small_all_reduces_of_many_nodes_take_the_tree():
    net = network(nodes=64)
    ring_hops = 2 * ((512 - 64) * 2e-6 + 63 * 4e-6)
    assert net.time_s("all_reduce", 1024, Group(512, 8, 64)) < BASE_S + ring_hops


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.integers(2, 64),
    st.integers(0, 5),
    st.floats(1, 1e10),
)
def test_more_bytes_never_take_less(kind, size, stride_exponent, num_bytes):
    net, group = network(nodes=64), strided_group(size, 2**stride_exponent, 8)
    assert net.time_s(kind, 2 * num_bytes, group) > net.time_s(kind, num_bytes, group) > 0


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
