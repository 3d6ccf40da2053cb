"""Attention of engines with kernels of their own: one operator that knows sinks and windows, traced only where it makes another graph."""

from __future__ import annotations

from typing import Any

import pytest

import ahp
from ahp.errors import BadInput
from ahp.forecast.step import graph_of_engine
from ahp.graph import trace
from ahp.graph.engine_attention import with_engine_attention
from ahp.graph.engine_operator import known_to_transformers
from ahp.graph.key_heads import has_fused_attention, is_fused
from ahp.graph.models import ENGINE, build_model
from ahp.graph.operators import ModelGraph, Segment
from ahp.job import Job
from ahp.plan import EngineChoice
from ahp.search.problem import problem

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
SINKS = SIZES | {
    "model_type": "gpt_oss", "head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
WINDOWS = SIZES | {"model_type": "mistral", "sliding_window": 8}
MAMBA = {
    "model_type": "mamba2", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16,
    "state_size": 16, "n_groups": 1, "chunk_size": 16,
}  # fmt: skip
JOB = Job(sequence_length=64, global_batch_size=8, precision="bf16")


def traced(model: object, job: Job = JOB) -> ModelGraph:
    return ahp.analyze(model, job)


def attention_flops(block: Segment) -> int:
    return sum(op.flops for op in block.operators if is_fused(op))


@pytest.mark.slow
def test_attention_to_sinks_is_one_operator_and_windows_see_their_tokens() -> None:
    graph = traced(SINKS)
    assert not has_fused_attention(graph)
    found = with_engine_attention(graph, JOB)
    windowed, full = (found.blocks[kind] for kind in found.layers[:2])
    assert attention_flops(full) > 0
    # A window of 8 tokens gets 16 keys of 64; causal attention counts half of both.
    assert attention_flops(windowed) == attention_flops(full) * 16 // 64
    assert found.num_parameters == graph.num_parameters
    assert found.at(4).flops() == 4 * found.flops()


@pytest.mark.slow
def test_windows_longer_than_the_sequence_make_no_other_graph() -> None:
    graph = traced(WINDOWS)
    found = with_engine_attention(graph, JOB)
    assert attention_flops(found.blocks[0]) == attention_flops(graph.blocks[0]) // 4
    short = JOB.model_copy(update={"sequence_length": 8})
    graph = traced(WINDOWS, short)
    assert with_engine_attention(graph, short) is graph


@pytest.mark.slow
def test_a_model_with_plain_attention_keeps_its_graph() -> None:
    graph = traced(SIZES | {"model_type": "llama"})
    assert with_engine_attention(graph, JOB) is graph
    live = ahp.analyze(build_model(WINDOWS), JOB)
    assert with_engine_attention(live, JOB) is live


def test_asked_again_it_is_the_same_object() -> None:
    graph = traced(WINDOWS)
    found = with_engine_attention(graph, JOB)
    assert with_engine_attention(graph, JOB) is found
    assert with_engine_attention(found, JOB) is found


def test_transformers_is_left_as_it_was() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = set(ALL_ATTENTION_FUNCTIONS)
    with known_to_transformers():
        assert set(ALL_ATTENTION_FUNCTIONS) == {*before, ENGINE}
    with pytest.raises(BadInput):  # traced, not read from what is kept
        trace.analyze(WINDOWS | {"hidden_act": "none"}, JOB, attention=ENGINE)
    trace.analyze(WINDOWS, JOB, attention=ENGINE)
    assert set(ALL_ATTENTION_FUNCTIONS) == before
    assert ENGINE not in before


@pytest.mark.parametrize(
    ("engine", "own"), [("megatron", True), ("torchtitan", True), ("ahp", False), ("deepspeed", False)]
)
def test_engines_that_run_the_code_of_transformers_have_its_attention(engine: str, own: bool) -> None:
    graph, choice = traced(WINDOWS), EngineChoice.model_validate({"name": engine})
    assert (graph_of_engine(graph, JOB, choice) is not graph) == own
    math = choice.model_copy(update={"attention": "math"})
    assert graph_of_engine(graph, JOB, math) is graph


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "engine", "told"),
    [(SINKS, "ahp", True), (SINKS, "megatron", False), (MAMBA, "ahp", False), (MAMBA, "megatron", False)],
)
def test_only_attention_that_an_engine_runs_in_parts_is_told_to_be_eager(
    model: dict[str, Any], engine: str, told: bool, recwarn: pytest.WarningsRecorder
) -> None:
    graph, choice = traced(model), EngineChoice.model_validate({"name": engine})
    graph_of_engine(graph, JOB, choice)
    eager = [str(one.message) for one in recwarn if "no sdpa attention" in str(one.message)]
    assert bool(eager) == told, eager
    recwarn.clear()
    graph_of_engine(graph, JOB, choice.model_copy(update={"attention": "math"}))
    assert not recwarn.list, "math was asked for"


@pytest.mark.slow
def test_a_search_bounds_and_prices_the_same_graph() -> None:
    asked = problem(traced(SINKS), "4xH100-SXM-80GB", JOB, engine="megatron")
    assert has_fused_attention(asked.graph)
    assert asked.any_pricer.graph is asked.graph
    found = ahp.search(traced(SINKS), "4xH100-SXM-80GB", JOB, engine="megatron")
    assert found.certificate.proven
    alone = ahp.simulate(
        model=SINKS, cluster="4xH100-SXM-80GB", job=JOB, parallelism=found.fastest.parallelism, engine="megatron"
    )
    assert alone.step_time_s == found.fastest.priced.step_time_s
