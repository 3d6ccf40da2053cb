"""What adapters leave of the costs of training: states, gradients, and what ranks exchange."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest

import ahp
from ahp.errors import BadInput, NotExpressible
from ahp.forecast.split import KeysWay, split
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.plan import Forecast
from tests.search.small import MODELS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft (the extra lora) is not installed"
)

LORA = {"r": 4}
JOB: dict[str, Any] = {"sequence_length": 64, "global_batch_size": 8}


@cache
def graph(adapted: bool) -> ModelGraph:
    return analyze(MODELS["llama"], JOB | {"lora": LORA if adapted else None})


def price(parallelism: dict[str, Any], adapted: bool = True, **job: Any) -> Forecast:
    asked = JOB | job | {"lora": LORA if adapted else None}
    return ahp.simulate(model=graph(adapted), cluster="4xH100-SXM-80GB", job=asked, parallelism=parallelism)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "held"), [("bf16", 2), ("fp32", 4)])
def test_frozen_weights_are_held_as_they_compute_and_have_no_states(precision: str, held: int) -> None:
    found = price({"data_parallel_shard_degree": 4}, precision=precision)
    total = graph(True).num_parameters
    trained = graph(True).trained_share * total
    assert found.memory["parameters"] == pytest.approx((4 * trained + held * (total - trained)) / 4, abs=8)
    assert found.memory["optimizer_states"] == pytest.approx(8 * trained / 4, abs=8)


@pytest.mark.parametrize(
    "parallelism",
    [
        {"data_parallel_replicate_degree": 4},
        {"data_parallel_shard_degree": 4, "zero_stage": 1},
        {"data_parallel_shard_degree": 4},
        {"data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2},
    ],
    ids=["replicas", "zero1", "zero3", "pipeline"],
)
def test_only_adapters_are_reduced_and_updated(parallelism: dict[str, Any]) -> None:
    full, adapted = (price(parallelism, which) for which in (False, True))
    for part in ("gradients", "reduce_buffers", "optimizer_states", "parameters"):
        assert adapted.memory[part] <= full.memory[part]
    assert adapted.step["backward"] < full.step["backward"]
    assert adapted.step["optimizer"] < full.step["optimizer"]
    assert adapted.step.get("gradient_reduce", 0.0) <= full.step.get("gradient_reduce", 0.0)


@pytest.mark.parametrize("way", ["parts", "whole", "gathered", "whole attention"])
def test_adapters_follow_the_slicing_of_their_layers(way: KeysWay) -> None:
    plain, adapted = (graph(which).blocks[0] for which in (False, True))
    before, after = split(plain, "block", way_of_keys=way), split(adapted, "block", way_of_keys=way)
    by_index = {op.index: op for op in adapted.operators}

    def modules(indices: frozenset[int], suffix: str) -> set[str]:
        found = (by_index[i].module for i in indices)
        return {module.removesuffix(suffix) for module in found if module.endswith(suffix)}

    columns, rows = ({plain.operators[i].module for i in found} for found in (before.column, before.row))
    assert columns or way == "whole attention"
    assert modules(after.column, ".base_layer") == modules(after.column, ".lora_B.default") == columns
    assert modules(after.row, ".base_layer") == modules(after.row, ".lora_A.default") == rows
    assert not modules(after.column, ".lora_A.default") | modules(after.row, ".lora_B.default")
    # What is summed for an adapter is of the width of its rank.
    assert sum(spec.shape[-1] == LORA["r"] for spec in after.forward_reduce) == len(rows)
    assert len(after.forward_reduce) == 2 * len(before.forward_reduce)


@pytest.mark.slow
def test_the_slicing_of_a_model_says_the_same() -> None:
    found = ahp.slicing(graph(True), 2)
    q, down = "model.layers.*.self_attn.q_proj", "model.layers.*.mlp.down_proj"
    assert [found[f"{q}.{part}"] for part in ("base_layer", "lora_A.default", "lora_B.default")] == [
        "column", "replicated", "column"
    ]  # fmt: skip
    assert [found[f"{down}.{part}"] for part in ("base_layer", "lora_A.default", "lora_B.default")] == [
        "row", "row", "replicated"
    ]  # fmt: skip


def test_a_plan_says_what_is_trained() -> None:
    ranking = ahp.search(graph(True), "4xH100-SXM-80GB", JOB | {"lora": LORA})
    assert any(words.startswith("job.lora: ") and "without gradients" in words for words in ranking.best.why)
    assert ranking.best.job.model_dump()["lora"]["r"] == 4
    assert ranking.certificate.proven


def test_graphs_of_other_jobs_are_refused() -> None:
    with pytest.raises(BadInput, match=r"job\.lora.*the graph was traced for another"):
        ahp.simulate(model=graph(False), cluster="4xH100-SXM-80GB", job=JOB | {"lora": LORA}, parallelism={})


@pytest.mark.parametrize("engine", ["torchtitan", "megatron", "deepspeed", "accelerate"])
def test_other_engines_have_no_adapters(engine: str) -> None:
    with pytest.raises(NotExpressible, match=r"job\.lora = .*null; or engine\.name ahp"):
        ahp.simulate(
            model=graph(True), cluster="4xH100-SXM-80GB", job=JOB | {"lora": LORA}, parallelism={}, engine=engine
        )


def test_fp8_has_no_adapters() -> None:
    with pytest.raises(NotExpressible, match=r"job\.precision = 'fp8'.*with job\.lora.*valid: bf16, fp16, fp32"):
        price({}, precision="fp8")
