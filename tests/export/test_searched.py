"""What a search offers for an engine, ``ahp export`` can write for it."""

from __future__ import annotations

from typing import Any

import pytest

from ahp.cluster.model import Cluster
from ahp.errors import NotExpressible
from ahp.export.registry import TARGETS
from ahp.export.table import Subject
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan
from ahp.search.problem import Problem, problem
from ahp.search.ranking import search
from ahp.search.result import Ranking
from ahp.search.space import build

LAYERS = 4
DENSE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = DENSE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CLUSTER = Cluster.resolve("2x4xH100-SXM-80GB")
EACH = [
    pytest.param({"name": "torchtitan"}, "bf16", "0.3.0", id="torchtitan"),
    pytest.param({"name": "torchtitan"}, "fp8", "0.2.2", id="torchtitan in fp8"),
    pytest.param({"name": "torchtitan", "version": "0.2.2"}, "bf16", "0.2.2", id="torchtitan 0.2.2"),
    pytest.param({"name": "megatron"}, "bf16", "0.20", id="megatron"),
    pytest.param({"name": "deepspeed"}, "bf16", "0.19.8", id="deepspeed"),
    pytest.param({"name": "accelerate"}, "bf16", "1.15.0", id="accelerate"),
]
TITANS_NAME = "llama3/llama3_8b"


def a_job(precision: str = "bf16") -> Job:
    return Job(sequence_length=256, global_batch_size=16, precision=precision)  # type: ignore[arg-type]


TWICE = [
    pytest.param(
        *one.values, EXPERTS, id=f"{one.id}-experts", marks=() if one in (EACH[0], EACH[-1]) else pytest.mark.slow
    )
    for one in EACH
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "precision", "version", "model"),
    [*(pytest.param(*one.values, DENSE, id=f"{one.id}-dense") for one in EACH), *TWICE],
)
def test_a_search_offers_what_the_engines_file_can_say(
    engine: dict[str, Any], precision: str, version: str, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, choice = a_job(precision), EngineChoice(**engine)
    asked = problem(analyze(model, job), CLUSTER, job, {"micro_batch_size": 1}, choice)
    offered = set(build(asked))
    monkeypatch.setattr(Problem, "untold", lambda self, layout: None)
    every = offered | set(build(asked))
    dialect = TARGETS[choice.name].formats[version].dialect  # type: ignore[attr-defined]

    def can_be_said(layout: Parallelism) -> bool:
        try:
            dialect.settings(
                Subject(Plan(model=model, job=job, parallelism=layout, engine=choice), LAYERS, TITANS_NAME)
            )
        except NotExpressible:
            return False
        return True

    assert len(offered) > 20
    assert {layout.short() for layout in every - offered if can_be_said(layout)} == set()
    assert {layout.short() for layout in offered if not can_be_said(layout)} == set()


def test_a_key_that_is_given_is_kept_and_its_refusal_told() -> None:
    job = a_job()
    graph = analyze(DENSE, job)

    def searched(**keys: Any) -> Ranking:
        return search(graph, CLUSTER, job, constraints={"pipeline_parallel_degree": 1, **keys}, engine="torchtitan")

    assert searched().notes == ()
    ranking = searched(zero_stage=1)
    assert ranking.best.parallelism.zero_stage == 1
    [note] = ranking.notes
    assert note.startswith("ahp export torchtitan refuses the first plan: zero_stage = 1: without a pipeline")
    with pytest.raises(NotExpressible, match=r"zero_stage = 0: nothing is sharded.*\(valid: 2, 3"):
        search(graph, CLUSTER, job, constraints={"tensor_parallel_degree": 8}, engine="accelerate")
