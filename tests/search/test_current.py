"""What runs today is priced beside the winner, fits or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ahp.errors import BadInput
from ahp.plan import Parallelism, Plan, Rejected
from ahp.search.current import Current
from ahp.search.ranking import search
from ahp.search.result import Ranking

from .small import small


def ranking(current: Parallelism | dict | None, memory_bytes: int | None = None, **constraints: int) -> Ranking:
    asked = small("llama", "4xH100-SXM-80GB", memory_bytes=memory_bytes)
    return search(asked.graph, asked.cluster, asked.job, constraints=constraints, current=current)


def told(current: Parallelism | dict, memory_bytes: int | None = None, **constraints: int) -> Current:
    found = ranking(current, memory_bytes, **constraints).current
    assert found is not None
    return found


def test_nothing_is_told_of_what_was_not_given() -> None:
    assert ranking(None).current is None


@pytest.mark.slow
def test_the_best_is_the_best() -> None:
    best = ranking(None).best
    assert told(best.parallelism).against_best == "it is the best"
    assert told(best.parallelism).forecast == best.forecast


def test_a_stage_that_runs_as_the_best_is_the_best() -> None:
    given = {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}
    best = ranking(None, **given).best
    assert best.parallelism.zero_stage == 1
    found = ranking(best.parallelism.model_copy(update={"zero_stage": 2}), **given)
    assert found.current is not None
    assert found.current.against_best == "it is the best"
    assert found.best.parallelism == best.parallelism
    assert all(plan.parallelism.zero_stage != 2 for plan in found)


def test_a_slower_one_says_why() -> None:
    found = told({"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2, "activation_checkpoint": "full"})
    assert found.forecast is not None
    assert found.forecast.fits
    assert " as long: " in found.against_best or " slower: " in found.against_best
    assert found.words().startswith("dp2x1 zero0 tp2 mb1 full: ")


@pytest.mark.slow
def test_the_plan_keeps_it_and_what_the_others_cost(tmp_path: Path) -> None:
    found = ranking({"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2, "activation_checkpoint": "full"})
    found.best.save(tmp_path / "plan.yaml")
    kept = Plan.load(tmp_path / "plan.yaml")
    assert found.current is not None
    forecast = found.current.forecast
    assert forecast is not None
    assert kept.current == Rejected.of(found.current.parallelism, forecast, found.current.against_best)
    assert kept.current.memory_bytes == sum(forecast.memory.values())
    assert kept.rejected
    others = {plan.parallelism: plan.forecast for plan in found}
    for one in kept.rejected:
        other = others.get(one.parallelism)
        assert other is None or one == Rejected.of(one.parallelism, other, one.reason)
        assert one.band_s is not None
        assert one.memory_bytes
        assert one.fits is not None
    refused = ranking({"tensor_parallel_degree": 8}).best.current
    assert refused is not None
    assert refused.step_time_s is None
    assert "cannot run" in refused.reason


def test_one_that_cannot_run_says_why() -> None:
    found = told({"tensor_parallel_degree": 8})
    assert found.forecast is None
    assert "cannot run" in found.against_best
    assert "multiply to 8" in found.against_best


def test_one_that_does_not_fit_is_priced_all_the_same() -> None:
    # Each kind of group has its communicator: two kinds need more than one.
    found = told({"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, memory_bytes=1_500_000_000)
    assert found.forecast is not None
    assert not found.forecast.fits
    assert "does not fit: " in found.against_best


def test_one_that_the_space_has_not_is_a_candidate() -> None:
    uneven = Parallelism(pipeline_parallel_degree=4, layers_per_stage=(1, 1, 1, 1), pipeline_parallel_schedule="GPipe")
    found = ranking(uneven, pipeline_parallel_degree=4, micro_batch_size=1, virtual_stages_per_rank=1)
    assert uneven in [plan.parallelism for plan in found]


@pytest.mark.slow
def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(BadInput, match="tensor_degree: unknown key"):
        ranking({"tensor_degree": 2})
