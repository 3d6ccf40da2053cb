"""A setting that needs less memory is remarked where a faster layout fits with it; the figures are those of a search with that setting."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

import ahp
from ahp.plan import Plan
from ahp.search.less_memory import less_memory
from ahp.search.problem import Problem, problem
from ahp.search.ties import TIED
from ahp.words import percent, seconds

JOB = ahp.Job(sequence_length=8192, global_batch_size=64)


@cache
def best_of(cluster: str, engine: str = "ahp") -> tuple[Problem, Plan]:
    """With a vocabulary of 128,256 the logits of one sequence take 4 GiB in fp32, of a device's 24."""
    graph = ahp.analyze("llama3.2-1b", JOB)
    best = ahp.search(graph, cluster, JOB, engine=engine).best
    return problem(graph, cluster, JOB, None, best.engine), best


@pytest.mark.slow
def test_a_setting_is_named_with_the_plan_that_a_search_with_it_finds() -> None:
    asked, best = best_of("2xRTX-4090-24GB")
    remark = less_memory(asked, best)
    assert remark is not None
    chunks = re.match(r"faster with engine.loss_chunk_tokens (\d+)( and engine.offload_optimizer true)?: ", remark)
    assert chunks is not None
    setting = {"loss_chunk_tokens": int(chunks[1]), "offload_optimizer": chunks[2] is not None}
    there = ahp.search(asked.graph, asked.cluster, JOB, engine=best.engine.model_copy(update=setting)).fastest
    step_s, before_s = there.priced.step_time_s, best.priced.step_time_s
    assert step_s < before_s * (1 - TIED)
    assert remark.endswith(
        f": {there.parallelism.short()}, {seconds(step_s)} a step, {percent(1 - step_s / before_s)} less"
    )


@pytest.mark.parametrize(
    ("cluster", "engine"), [("2xH100-SXM-80GB", "ahp"), ("2xRTX-4090-24GB", "torchtitan")], ids=["ample", "no setting"]
)
def test_nothing_is_remarked_where_memory_does_not_bind_or_the_engine_has_no_setting(cluster: str, engine: str) -> None:
    assert less_memory(*best_of(cluster, engine)) is None


def test_what_is_set_already_is_not_remarked() -> None:
    asked, best = best_of("2xRTX-4090-24GB")
    saving = best.engine.model_copy(update={"loss_chunk_tokens": 2048, "offload_optimizer": True})
    assert less_memory(replace(asked, engine=saving), best) is None
