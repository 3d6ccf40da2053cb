"""Layouts that the forecast cannot tell apart: the simplest comes first, and the best of each family is told."""

from __future__ import annotations

import pytest

from ahp.plan import Forecast, Parallelism
from ahp.search import families
from ahp.search.method import Method
from ahp.search.ranking import search
from ahp.search.reasons import slower_because
from ahp.search.result import Ranking
from ahp.search.ties import TIED, complexity, simplest_first

from .small import small

REPLICAS = Parallelism(data_parallel_replicate_degree=8)
ZERO_1, ZERO_3 = (Parallelism(data_parallel_shard_degree=8, zero_stage=stage) for stage in (1, 3))
HYBRID = Parallelism(data_parallel_replicate_degree=2, data_parallel_shard_degree=4, zero_stage=2)
TENSOR = Parallelism(data_parallel_shard_degree=4, tensor_parallel_degree=2, zero_stage=3)
PIPELINE = Parallelism(data_parallel_shard_degree=4, pipeline_parallel_degree=2, zero_stage=1)
INTERLEAVED = Parallelism(
    data_parallel_shard_degree=4, pipeline_parallel_degree=2, zero_stage=1, virtual_stages_per_rank=2,
    pipeline_parallel_schedule="Interleaved1F1B",
)  # fmt: skip
SPLIT = INTERLEAVED.model_copy(update={"pipeline_parallel_schedule": "ZBVZeroBubble"})
UNEVEN = PIPELINE.model_copy(update={"layers_per_stage": (3, 1)})


def forecast(step_time_s: float) -> Forecast:
    return small("llama", "1xH100-SXM-80GB").price(Parallelism()).model_copy(update={"step_time_s": step_time_s})


def ranking(**constraints: object) -> Ranking:
    asked = small("llama", "2x4xA100-SXM-80GB", batch=32, constraints=constraints)
    return search(asked.graph, asked.cluster, asked.job, constraints=asked.constraints, engine=asked.engine)


def test_layouts_are_simple_in_this_order() -> None:
    ordered = [REPLICAS, ZERO_1, ZERO_3, HYBRID, TENSOR, PIPELINE, UNEVEN, INTERLEAVED, SPLIT]
    turned = ordered[::-1]
    assert sorted(turned, key=complexity) == ordered


def test_the_simplest_of_the_tied_leads_and_the_others_keep_their_order() -> None:
    times = {PIPELINE: 1.0, TENSOR: 1.0 + 0.9 * TIED, ZERO_1: 1.0 + 1.1 * TIED, REPLICAS: 2.0}
    pairs = [(layout, forecast(time_s)) for layout, time_s in times.items()]
    ordered = simplest_first(pairs, TIED)
    assert [layout for layout, _ in ordered.ranked] == [TENSOR, PIPELINE, ZERO_1, REPLICAS]
    assert ordered.fastest is pairs[0]
    assert ordered.num_tied == 2
    assert ordered.title() == "simplest of the 2 layouts that are tied with the fastest"
    (words,) = ordered.words()
    assert words.startswith(f"tied with {PIPELINE.short()}, which is 1.8 % faster by the forecast")


def test_without_a_tie_the_fastest_leads() -> None:
    pairs = [(PIPELINE, forecast(1.0)), (REPLICAS, forecast(1.0))]
    assert simplest_first(pairs, 0.0).ranked == pairs
    alone = simplest_first([pairs[0], (REPLICAS, forecast(1.0 + 1.01 * TIED))], TIED)
    assert alone.first_is_fastest
    assert not alone.words()
    assert alone.title() == "fastest of the layouts that fit"


@pytest.mark.parametrize(
    ("step_s", "told"),
    [
        (0.97, "3.0 % faster by the forecast"),
        (0.99, "tied, 1.0 % faster by the forecast"),
        (0.9999, "as fast"),
        (1.0001, "as fast"),
        (1.004, "as fast within 0.4 %"),
        (1.01, "tied, 1.0 % slower: "),
        (1.03, "3.0 % slower: "),
    ],
)
def test_a_reason_never_has_a_share_below_nothing(step_s: float, told: str) -> None:
    said = slower_because(forecast(step_s), forecast(1.0))
    assert said == told or (told.endswith(": ") and said.startswith(told))


@pytest.mark.slow
def test_the_first_plan_is_the_simplest_of_all_that_are_tied_and_says_so() -> None:
    found = ranking()
    assert found.best.forecast is not None
    assert found.fastest.forecast is not None
    assert found.fastest.forecast.step_time_s == pytest.approx(found.certificate.found_s)
    assert found.best.forecast.step_time_s <= found.fastest.forecast.step_time_s * (1 + TIED)
    tied = [p for p in (*found, *found.families) if p.forecast and p.forecast.step_time_s <= found.certificate.found_s * (1 + TIED)]  # fmt: skip
    assert complexity(found.best.parallelism) == min(complexity(plan.parallelism) for plan in tied)
    assert found.best.parallelism != found.fastest.parallelism
    assert any(line.startswith(f"tied with {found.fastest.parallelism.short()}, which ") for line in found.best.why)
    rest = [plan.forecast.step_time_s for plan in found.plans[1:] if plan.forecast]
    assert rest == sorted(rest)


@pytest.mark.slow
def test_every_family_that_is_asked_for_has_its_best() -> None:
    """Held against a search in which the family alone is legal."""
    found, one = ranking(), {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1}
    shown = [found.best, *found.families]
    assert found.twins > 0
    for fixed in (one | {"context_parallel_degree": 1}, {"pipeline_parallel_degree": 1}, {"tensor_parallel_degree": 1}):
        own = ranking(**fixed).fastest.forecast
        alike = [plan.forecast for plan in shown if all(getattr(plan.parallelism, key) == 1 for key in fixed)]
        assert own is not None
        # The first of its family may be the simplest of those that are tied.
        assert min(f.step_time_s for f in alike if f) <= own.step_time_s * (1 + TIED)
    kinds = [families.family(plan.parallelism) for plan in shown if plan.parallelism != found.fastest.parallelism]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.slow
def test_the_best_of_a_family_that_is_far_behind_is_searched_for() -> None:
    """Where pricing ends long before: data parallelism alone, with links between nodes that no replica should cross."""
    asked = small("llama", "2x4xA100-SXM-80GB@0.01", batch=32)
    found = search(asked.graph, asked.cluster, asked.job, engine=asked.engine, keep=1)
    told = {families.family(plan.parallelism) for plan in (found.best, *found.families)}
    assert () in told


@pytest.mark.slow
def test_other_methods_search_no_family_and_still_prefer_the_simple() -> None:
    asked = small("llama", "2x4xA100-SXM-80GB", batch=32)
    by = Method("anneal", budget=60)
    found = search(asked.graph, asked.cluster, asked.job, engine=asked.engine, method=by)
    assert found.best.forecast is not None
    assert found.fastest.forecast is not None
    assert found.best.forecast.step_time_s <= found.fastest.forecast.step_time_s * (1 + TIED)
