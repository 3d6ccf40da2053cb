"""A model that ``ahp``'s runtime cannot cut between its blocks is planned, and forecast, without what would cut it."""

from __future__ import annotations

from typing import Any

import pytest

import ahp
from ahp.errors import BadInput, NotExpressible
from ahp.graph.operators import ModelGraph

JOB = {"sequence_length": 64, "global_batch_size": 16, "precision": "bf16"}
MODEL: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16, "pad_token_id": 0,
}  # fmt: skip
"""Each of its blocks is given a tensor of its own that an embedding makes."""


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return ahp.analyze(MODEL, JOB)


@pytest.mark.slow
def test_the_graph_says_why(graph: ModelGraph) -> None:
    assert graph.uncuttable is not None
    assert "is given trainable tensors that block 0 is not" in graph.uncuttable
    assert graph.at(3).uncuttable == graph.uncuttable
    assert ahp.analyze("gpt2", JOB).uncuttable is None


@pytest.mark.parametrize(
    ("layout", "engine", "key"),
    [
        ({"pipeline_parallel_degree": 2}, {}, "pipeline_parallel_degree = 2"),
        ({"context_parallel_degree": 2}, {}, "context_parallel_degree = 2"),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": True}, {}, "enable_sequence_parallel = True"),
        ({"data_parallel_shard_degree": 2}, {"loss_chunk_tokens": 16}, "engine.loss_chunk_tokens = 16"),
    ],
)
def test_a_forecast_refuses_what_the_runtime_would(
    graph: ModelGraph, layout: dict[str, Any], engine: dict[str, Any], key: str
) -> None:
    with pytest.raises(BadInput, match=f"{key}: .*trainable tensors that block 0 is not"):
        ahp.simulate(model=graph, cluster="2xH100-SXM-80GB", job=JOB, parallelism=layout, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["8xH100-SXM-80GB", "mixed"])
def test_no_plan_cuts_it(graph: ModelGraph, cluster: str) -> None:
    groups: dict[str, Any] = {
        "groups": [
            {"name": "new", "device": "H100-SXM-80GB", "nodes": 1, "devices_per_node": 2},
            {"name": "old", "device": "A100-SXM-80GB", "nodes": 1, "devices_per_node": 2},
        ],
        "links": [{"between": ["new", "old"], "gbps": 200}],
    }
    ranking = ahp.search(graph, ahp.Cluster.from_dict(groups) if cluster == "mixed" else cluster, JOB)
    for plan in ranking.plans:
        layout = plan.parallelism
        assert (layout.num_stages, layout.context_parallel_degree, layout.enable_sequence_parallel) == (1, 1, False)
    with pytest.raises(NotExpressible, match="so it cannot be cut into stages"):
        ahp.search(graph, "8xH100-SXM-80GB", JOB, constraints={"pipeline_parallel_degree": 2})


def test_an_engine_with_models_of_its_own_is_not_asked(graph: ModelGraph) -> None:
    layout = {"pipeline_parallel_degree": 2, "micro_batch_size": 1}
    found = ahp.simulate(
        model=graph, cluster="2xH100-SXM-80GB", job=JOB, parallelism=layout, engine={"name": "megatron"}
    )
    assert found.step_time_s > 0
