"""What Muon's update costs: the products of Newton-Schulz by hand, of each matrix on one rank, and what travels."""

import pytest

import ahp
from ahp.cluster.model import Cluster
from ahp.engines.ahp import AhpEngine
from ahp.forecast.communication import Network
from ahp.forecast.efficiency import Rates
from ahp.forecast.group import Group
from ahp.forecast.muon import Muon, Places, places_of
from ahp.forecast.step import forecast
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

ALONE, FOUR = Group(1, 1, 1), Group(4, 4, 1)
TRAITS = AhpEngine().traits(Job.model_validate({"optimizer": "muon"}), Parallelism(), EngineChoice())


@pytest.fixture
def muon(hand_graph, monkeypatch):
    """On a device that does one FLOP of a product in a second, so that seconds are FLOPs."""
    monkeypatch.setattr(Rates, "matmul_s", lambda self, batch, m, n, k, precision: 2.0 * batch * m * n * k)
    nodes = make_cluster().groups[0]
    return Muon(hand_graph, Rates(nodes.device, None, 8), Network(nodes))


@pytest.mark.parametrize("shape", [(128, 32), (32, 128), (64, 64)])
def test_products_by_hand(muon, shape):
    r, c = min(shape), max(shape)
    gram, square, applied = 2 * r * c * r, 2 * r * r * r, 2 * r * r * c
    assert muon.product_s(shape) == 5 * (gram + square + applied)


@pytest.mark.parametrize(("blocks", "owners", "most"), [(1, 1, 2), (1, 4, 1), (4, 4, 2), (5, 4, 3)])
def test_matrices_are_dealt_out_whole(muon, blocks, owners, most):
    one = muon.product_s((128, 32))  # up and down; the norm's weight is no matrix
    assert muon.least_s() == 2 * one
    for places in (Places(ALONE, ALONE, ALONE, Group(owners, owners, 1)), Places(Group(owners, owners, 1), ALONE,
                   Group(owners, owners, 1), ALONE)):  # fmt: skip
        assert muon.stage_s({0: blocks}, places, TRAITS) == pytest.approx(most * one, rel=1e-6)


def test_parts_travel_in_16_bits(hand_graph):
    nodes = make_cluster().groups[0]
    network, numel = Network(nodes), 128 * 32
    muon = Muon(hand_graph, Rates(nodes.device, None, 8), network)
    alone = muon.stage_s({0: 1}, Places(ALONE, ALONE, ALONE, ALONE), TRAITS)
    sharded = muon.stage_s({0: 1}, Places(ALONE, FOUR, FOUR, ALONE), TRAITS)
    assert sharded == pytest.approx(alone / 2 + 2 * network.time_s("all_to_all", 2 * 2 * numel / 4, FOUR), rel=0.05)
    copied = muon.stage_s({0: 1}, Places(ALONE, ALONE, ALONE, FOUR), TRAITS)
    assert copied == pytest.approx(alone / 2 + network.time_s("all_gather", 2 * 2 * numel, FOUR), rel=0.05)


def test_which_ranks_hold_a_stages_matrices():
    layout = Parallelism(
        data_parallel_replicate_degree=2,
        data_parallel_shard_degree=2,
        tensor_parallel_degree=4,
        pipeline_parallel_degree=2,
    )
    places = places_of(layout, 8)
    assert places == Places(FOUR, Group(2, 2, 1), Group(8, 8, 1), Group(2, 1, 2))
    assert places.owners == 16


def optimizer_s(optimizer, **layout):
    forecast = ahp.simulate(
        model="llama3-8b",
        cluster=Cluster.parse("8xH100-SXM-80GB"),
        job={"sequence_length": 1024, "global_batch_size": 8, "optimizer": optimizer},
        parallelism=layout,
    )
    return forecast.step["optimizer"]


def test_replicas_on_other_kinds_of_nodes_are_sent_their_parts_over_the_link_between_them(hand_graph):
    """Either kind is one node, which has no network of its own."""
    layout = Parallelism(data_parallel_replicate_degree=2)
    job = Job.model_validate(
        {"optimizer": "muon", "sequence_length": hand_graph.sequence_length, "global_batch_size": 2}
    )

    def update_s(gbps):
        groups = [{"name": n, "device": n, "devices_per_node": 1} for n in ("H100-SXM-80GB", "A100-SXM-80GB")]
        links = [{"between": ["H100-SXM-80GB", "A100-SXM-80GB"], "gbps": gbps}]
        return forecast(hand_graph, Cluster.from_dict({"groups": groups, "links": links}), job, layout).step[
            "optimizer"
        ]

    assert update_s(1) > update_s(100)


def test_only_the_kind_that_has_a_stage_sends_its_matrices(hand_graph):
    """Stage 0 lies on two nodes, stage 1 on one, which has no network."""
    layout = Parallelism(data_parallel_replicate_degree=2, pipeline_parallel_degree=2)
    job = Job.model_validate(
        {"optimizer": "muon", "sequence_length": hand_graph.sequence_length, "global_batch_size": 4}
    )
    groups = [
        {"name": "many", "device": "H100-SXM-80GB", "nodes": 2, "devices_per_node": 1, "inter_node_gbps": 100},
        {"name": "one", "device": "A100-SXM-80GB", "devices_per_node": 2},
    ]
    cluster = Cluster.from_dict({"groups": groups})
    assert forecast(hand_graph, cluster, job, layout).step["optimizer"] > 0


@pytest.mark.slow
def test_stages_and_shards_share_the_work():
    layouts = ({"data_parallel_shard_degree": 8}, {"pipeline_parallel_degree": 8})
    more = [optimizer_s("muon", **layout) - optimizer_s("adamw", **layout) for layout in layouts]
    # 32 layers, in each 4096 x 4096 twice, 1024 x 4096 twice and 4096 x 14336 three times: 6.7e14 FLOPs, over 8 devices.
    sizes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    flops = 32 * sum(5 * (4 * r * r * c + 2 * r**3) for r, c in sizes) / 8
    for found in more:
        assert flops / 989e12 < found < 2.5 * flops / 989e12
