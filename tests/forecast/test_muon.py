"""What Muon's update costs: the products of Newton-Schulz by hand, whole on every rank that holds a part."""

import pytest

import ahp
from ahp.cluster.model import Cluster
from ahp.engines.ahp import AhpEngine
from ahp.forecast.communication import Group, Network
from ahp.forecast.efficiency import Rates
from ahp.forecast.muon import Muon
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

ALONE, FOUR = Group(1, 1, 1), Group(4, 4, 1)


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


def test_a_block_is_its_matrices_whole_however_they_are_held(muon):
    traits = AhpEngine().traits(Job.model_validate({"optimizer": "muon"}), Parallelism(), EngineChoice())
    both = 2 * muon.product_s((128, 32))  # up and down; the norm's weight is no matrix
    assert muon.least_s() == both
    for tensor, shard in ((ALONE, ALONE), (FOUR, ALONE), (ALONE, FOUR)):
        assert muon.block_s(0, tensor, shard, traits) == pytest.approx(both, rel=1e-6)


def test_parts_are_gathered(hand_graph):
    nodes = make_cluster().groups[0]
    network = Network(nodes)
    muon = Muon(hand_graph, Rates(nodes.device, None, 8), network)
    traits = AhpEngine().traits(Job.model_validate({"optimizer": "muon"}), Parallelism(), EngineChoice())
    shorter = muon.block_s(0, ALONE, ALONE, traits)
    gathers_s = 2 * network.time_s("all_gather", 4 * 128 * 32, FOUR)
    assert muon.block_s(0, ALONE, FOUR, traits) == pytest.approx(shorter + gathers_s, rel=0.05)


def optimizer_s(optimizer, **layout):
    forecast = ahp.simulate(
        model="llama3-8b",
        cluster=Cluster.parse("8xH100-SXM-80GB"),
        job={"sequence_length": 1024, "global_batch_size": 8, "optimizer": optimizer},
        parallelism=layout,
    )
    return forecast.step["optimizer"]


@pytest.mark.slow
def test_stages_share_the_work_and_shards_do_not():
    sharded, staged = {"data_parallel_shard_degree": 8}, {"pipeline_parallel_degree": 8}
    more = [optimizer_s("muon", **layout) - optimizer_s("adamw", **layout) for layout in (sharded, staged)]
    # 32 layers, in each 4096 x 4096 twice, 1024 x 4096 twice and 4096 x 14336 three times: 6.7e14 FLOPs.
    sizes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    flops = 32 * sum(5 * (4 * r * r * c + 2 * r**3) for r, c in sizes)
    assert flops / 989e12 < more[0] < 2.5 * flops / 989e12
    assert more[1] == pytest.approx(more[0] / 8, rel=0.2)
