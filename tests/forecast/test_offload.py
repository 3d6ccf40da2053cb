"""The optimizer's states in host memory: what their way there and back takes, what they free, and what the search makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ahp
from ahp.cluster.model import Cluster
from ahp.engines.ahp import OFFLOAD_BUCKET_BYTES, AhpEngine
from ahp.errors import BadInput, NothingFits
from ahp.forecast.states import Shards, Weights, visiting_bytes
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism
from ahp.search.space import build
from tests.search.small import CLUSTERS, MODELS, small

MIB = 2**20
JOB = {"sequence_length": 64, "global_batch_size": 8}
OFFLOAD = EngineChoice(offload_optimizer=True)


def both(**asked: Any) -> tuple[Forecast, Forecast]:
    """Without and with the states in host memory."""
    found = (ahp.simulate(**asked, engine={"offload_optimizer": away}) for away in (False, True))
    return next(found), next(found)


@pytest.mark.parametrize("layout", [{"data_parallel_shard_degree": 8}, {"data_parallel_replicate_degree": 8}])
def test_sixteen_bytes_of_each_parameter_cross_the_link(layout: dict[str, int]) -> None:
    asked = {"model": MODELS["llama"], "cluster": "8xH100-SXM-80GB", "job": JOB}
    here, away = both(**asked, parallelism=layout)
    graph = ahp.analyze(MODELS["llama"], Job.model_validate(JOB))
    shards = layout.get("data_parallel_shard_degree", 1)
    assert away.step["offload"] == pytest.approx(16 * graph.num_parameters / shards / 55.2e9)
    assert "offload" not in here.step
    assert away.step_time_s == pytest.approx(sum(away.step.values()))
    assert {part: s for part, s in away.step.items() if part not in ("offload", "slowest_rank")} == {
        part: s for part, s in here.step.items() if part != "slowest_rank"
    }


def test_a_faster_link_and_the_slowest_device_of_a_mixed_cluster() -> None:
    def offload_s(*bytes_per_s: float) -> float:
        groups = [
            {
                "name": f"g{i}", "nodes": 1, "devices_per_node": 2, "inter_node_gbps": 400,
                "device": {"base": "H100-SXM-80GB", "host_bandwidth_bytes_per_s": rate},
            }
            for i, rate in enumerate(bytes_per_s)
        ]  # fmt: skip
        cluster = {"groups": groups} if len(groups) > 1 else {k: v for k, v in groups[0].items() if k != "name"}
        layout = {"data_parallel_replicate_degree": 2 * len(groups)}
        found = ahp.simulate(
            model=MODELS["llama"], cluster=cluster, job=JOB, parallelism=layout, engine={"offload_optimizer": True}
        )
        return found.step["offload"]

    assert offload_s(1e10) == pytest.approx(10 * offload_s(1e11))
    assert offload_s(1e11, 1e10) == pytest.approx(offload_s(1e10))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(CLUSTERS), st.data())
def test_never_faster_and_never_fuller(model: str, cluster: str, data: st.DataObject) -> None:
    asked = small(model, cluster)
    space = build(asked)
    block = data.draw(st.integers(0, len(space.blocks) - 1))
    layout = space.layout(block, data.draw(st.integers(0, int(space.blocks.rows[block]) - 1)))
    here, away = asked.price(layout), small(model, cluster, offload=True).price(layout)
    assert away.step_time_s > here.step_time_s
    assert away.memory_allocated_bytes <= here.memory_allocated_bytes
    assert away.fit_probability >= here.fit_probability
    assert sum(away.memory.values()) <= sum(here.memory.values())


@pytest.mark.slow
def test_what_visits_the_device_counts_where_it_is_more_than_what_backward_freed() -> None:
    few = {"sequence_length": 16, "global_batch_size": 1}
    here, away = both(model="gpt2", cluster="1xH100-SXM-80GB", job=few, parallelism={"activation_checkpoint": "full"})
    assert here.memory["activations"] == here.memory["temporaries"] == 0  # of few tokens the gradients are more
    # The head's gradients were reduced beside those of the last block, and the embedding's after them, in bf16 and fp32.
    vocabulary, block = 50257 * 768, 12 * 768**2 + 13 * 768
    freed, last = 4 * vocabulary + 2 * block, 6 * vocabulary
    assert away.memory["reduce_buffers"] == here.memory["reduce_buffers"]
    assert last > freed
    assert away.memory["optimizer_states"] == pytest.approx(OFFLOAD_BUCKET_BYTES - last, abs=MIB)
    assert 0 < away.memory["optimizer_states"] < here.memory["optimizer_states"] / 5


@pytest.mark.parametrize(("expert_ranks", "parameters"), [(1, 1_000), (4, 250 + 3_000)])
def test_little_visits_where_a_rank_updates_little(expert_ranks: int, parameters: int) -> None:
    """Experts are divided by fewer ranks. tests/runtime/optimizer/test_offload.py has the bytes that the runtime allocates."""
    weights = Weights(total=8_000, largest_block=0, outside_blocks=0, experts=6_000)
    traits = AhpEngine().traits(Job(), Parallelism(), OFFLOAD)
    assert visiting_bytes(weights, traits, Shards.among(8, expert_ranks)) == 8 * parameters
    many = replace(weights, total=8_000_000_000)
    assert visiting_bytes(many, traits, Shards.among(8, expert_ranks)) == OFFLOAD_BUCKET_BYTES


@pytest.mark.slow
def test_the_search_prices_it_when_it_is_asked_for() -> None:
    half = {"devices_per_node": 2, "device": {"base": "H100-SXM-80GB", "memory_bytes": 56 * 2**30}}
    job = {"sequence_length": 512, "global_batch_size": 2, "precision": "bf16"}
    graph = ahp.analyze("llama3-8b", Job.model_validate(job))
    with pytest.raises(NothingFits):
        ahp.search(graph, half, job)
    best = ahp.search(graph, half, job, engine={"offload_optimizer": True}).best
    assert best.forecast is not None
    assert best.forecast.fits
    assert best.forecast.step["offload"] > 0


def test_what_has_no_link_to_its_host_is_refused() -> None:
    asked: dict[str, Any] = {
        "model": MODELS["llama"],
        "job": JOB,
        "parallelism": {},
        "engine": {"offload_optimizer": True},
    }
    with pytest.raises(
        BadInput, match=r"engine.offload_optimizer = True: on a CPU .* host's memory already \(valid: False\)"
    ):
        ahp.simulate(**asked, cluster={"nodes": 1, "devices_per_node": 1, "device": "cpu"})
    cluster = Cluster.parse("1xH100-SXM-80GB")
    device = cluster.groups[0].device.model_copy(update={"host_bandwidth_bytes_per_s": None})
    nodes = cluster.groups[0].model_copy(update={"device": device})
    rule = r"engine.offload_optimizer = True: no bandwidth is given between a H100-SXM-80GB .* give device.host_bandwidth_bytes_per_s"
    with pytest.raises(BadInput, match=rule):
        ahp.simulate(**asked, cluster=Cluster(groups=(nodes,)))
