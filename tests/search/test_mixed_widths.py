"""Stages of unlike width in the search: what is proposed is legal and faster, and no such layout takes less than its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ahp.errors import BadInput, NothingFits
from ahp.forecast.step import forecast
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import Parallelism
from ahp.search.mixed import widths
from ahp.search.mixed.balance import share
from ahp.search.mixed.floors import ShapeFloors
from ahp.search.mixed.space import spaces_of
from ahp.search.mixed.widths import UnlikeWidths, _Finder, unlike_widths
from ahp.search.problem import Problem, problem
from ahp.search.ranking import search

from .small import SEQUENCE, graph
from .test_mixed import H100, L4, cluster_of

JOB = {"sequence_length": SEQUENCE, "global_batch_size": 32, "precision": "bf16"}
SEVERAL = cluster_of((L4, 1, 4), (H100, 1, 2), gbps=100)
FIXED: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "micro_batch_size": 2,
    "stages": [{"group": "a", "layers": 1, "tensor_parallel_degree": 4}, {"group": "b", "layers": 3}],
}


def asked(**constraints: Any) -> Problem:
    return problem(graph("llama"), SEVERAL, JOB, constraints, {"name": "ahp", "compile": False})


@pytest.mark.slow
def test_what_is_proposed_is_legal_and_costs_what_the_forecast_says() -> None:
    found = unlike_widths(asked(), [])
    assert found.fitting
    assert found.forecasts >= len(found.fitting)
    assert [f.step_time_s for _, f in found.fitting] == sorted(f.step_time_s for _, f in found.fitting)
    for layout, priced in found.fitting:
        assert layout.has_unlike_widths
        assert priced.fits
        assert forecast(graph("llama"), SEVERAL, asked().job, layout, asked().engine) == priced
        widths: dict[str, set[tuple[int, int]]] = {}
        for stage, width in zip(layout.stages or (), layout.widths, strict=True):
            widths.setdefault(str(stage.group), set()).add(width)
        assert all(len(some) == 1 for some in widths.values()), "a group has one width"


@pytest.mark.slow
def test_layouts_that_do_not_fit_take_no_place_of_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = cluster_of((L4, 1, 4), (H100, 1, 2), gbps=100, memory={"a": 1_335_000_000})
    used = problem(graph("llama"), tight, JOB, {}, {"name": "ahp", "compile": False})
    finder = _Finder(used)
    promises = sorted(finder.promising([]), key=lambda one: one.pipeline_s)
    fits = [finder.priced(finder.layout(promise)) for promise in promises]
    assert not any(fits[:2])
    assert any(fits)
    monkeypatch.setattr(widths, "PRICED", 2)
    found = unlike_widths(used, [])
    assert found.fitting
    assert found.fitting[0][1].step_time_s <= next(filter(None, fits)).forecast.step_time_s


@pytest.mark.parametrize(
    "constraints", [{"tensor_parallel_degree": 2}, {"data_parallel_shard_degree": 1}, {"virtual_stages_per_rank": 2}, {"layers_per_stage": (2, 2)}]
)  # fmt: skip
def test_where_the_user_says_the_width_there_is_one(constraints: dict[str, Any]) -> None:
    assert unlike_widths(asked(**constraints), []) == UnlikeWidths()


@pytest.mark.slow
def test_a_key_that_is_fixed_as_it_is_without_it_hides_no_layout() -> None:
    keys = {"virtual_stages_per_rank": 1, "expert_parallel_degree": 1}
    assert unlike_widths(asked(**keys), []).fitting == unlike_widths(asked(), []).fitting


def test_what_the_user_has_fixed_beside_widths_is_kept() -> None:
    keys = {"micro_batch_size": 2, "activation_checkpoint": "full", "pipeline_parallel_schedule": "GPipe"}
    found = unlike_widths(asked(**keys), [])
    assert found.fitting
    for layout, _ in found.fitting:
        assert {key: getattr(layout, key) for key in keys} == keys


@pytest.mark.parametrize("method", [None, "ring", "all-to-all"])
def test_ranks_share_sequences_as_the_user_has_fixed_it(method: str | None) -> None:
    used = asked(context_parallel_degree=2, **({} if method is None else {"context_parallel_method": method}))
    found = unlike_widths(used, [])
    assert found.fitting
    for layout, priced in found.fitting:
        assert layout.has_unlike_widths
        assert layout.context_parallel_degree == 2
        assert layout.context_parallel_method == method or method is None
        assert forecast(graph("llama"), SEVERAL, used.job, layout, used.engine) == priced


@pytest.mark.parametrize("degree", [2, 4])
def test_two_ranks_share_sequences_and_as_many_as_in_the_fastest_layouts_with_cells_alike(degree: int) -> None:
    near = Parallelism(context_parallel_degree=degree, context_parallel_method="ring", micro_batch_size=32)
    finder = _Finder(problem(graph("llama"), cluster_of((L4, 1, 8), (H100, 1, 8), gbps=100), JOB, {}, {"name": "ahp"}))
    commons = [one.common for one in finder.promising([(near, None)])]  # type: ignore[list-item]
    assert {(one.context, one.method) for one in commons} == {
        (1, None),
        (2, "ring"),
        (2, "all-to-all"),
        (degree, "ring"),
    }
    assert {one.whole for one in commons} >= {1, 2, 4, 8}


def test_experts_that_no_ranks_share_are_offered_and_those_with_a_balance_loss_are_not() -> None:
    used = problem(
        graph("experts"),
        SEVERAL,
        JOB,
        {"micro_batch_size": 2, "data_parallel_replicate_degree": 1},
        {"name": "ahp", "compile": False},
    )
    found = unlike_widths(used, [])
    assert found.fitting
    assert all(layout.expert_parallel_degree == 1 for layout, _ in found.fitting)
    balanced = replace(used.graph, config={**used.graph.config, "balance_loss": 0.01})
    assert unlike_widths(replace(used, graph=balanced), []) == UnlikeWidths()


def test_other_engines_are_not_offered_any() -> None:
    other = problem(graph("llama"), SEVERAL, JOB, {}, {"name": "torchtitan", "compile": False})
    assert unlike_widths(other, []).fitting == []


def test_a_layout_that_is_given_with_its_widths_is_the_only_one() -> None:
    engine = {"name": "ahp", "compile": False}
    open_schedule = search(graph("llama"), SEVERAL, JOB, constraints=FIXED, engine=engine)
    assert {one.parallelism.widths for one in open_schedule} == {((1, 4), (1, 1))}
    given = {**FIXED, "pipeline_parallel_schedule": "1F1B"}
    found = search(graph("llama"), SEVERAL, JOB, constraints=given, engine=engine)
    (plan,) = found.plans
    assert plan.parallelism.widths == ((1, 4), (1, 1))
    assert plan.parallelism.micro_batch_size == 2
    assert plan.forecast == forecast(graph("llama"), SEVERAL, asked().job, plan.parallelism, asked().engine)
    wrong = {**FIXED, "stages": [{**FIXED["stages"][0], "tensor_parallel_degree": 3}, FIXED["stages"][1]]}
    with pytest.raises(BadInput, match=r"stages.tensor_parallel_degree = 3"):
        search(graph("llama"), SEVERAL, JOB, constraints=wrong)


@pytest.mark.slow
def test_a_given_layout_that_does_not_fit_is_said_to_miss() -> None:
    small = cluster_of((L4, 1, 4), (H100, 1, 2), gbps=100, memory={"a": 10**6})
    with pytest.raises(NothingFits, match=r"nearest miss, dp1x1 .*a:1/tp4"):
        search(graph("llama"), small, JOB, constraints=FIXED, engine={"name": "ahp", "compile": False})


@pytest.mark.slow
def test_the_ranking_has_them_in_their_place_and_the_certificate_a_bound_of_them() -> None:
    job = Job(sequence_length=2048, global_batch_size=32, precision="fp16")
    cluster = cluster_of(("V100-SXM-32GB", 2, 4), ("A100-SXM-80GB", 1, 2), gbps=100)
    fixed = {"micro_batch_size": 1, "data_parallel_replicate_degree": 1}
    engine = {"name": "ahp", "compile": False}
    found = search(analyze("llama3-8b", job), cluster, job, constraints=fixed, engine=engine, keep=50)
    times = [plan.forecast.step_time_s for plan in found.plans if plan.forecast is not None]
    assert times == sorted(times)
    alike = next(plan for plan in found.plans if not plan.parallelism.has_unlike_widths)
    assert alike.forecast is not None
    assert found.best.parallelism.has_unlike_widths
    assert times[0] < alike.forecast.step_time_s == found.certificate.best_s
    assert "of them with stages of unlike width" in found.proof[0]
    assert "; not proven: stages of unlike width (at least " in found.proof[2]
    assert not any(line.startswith(("tensor parallel", "no data parallelism")) for line in found.best.why)
    assert any(line.startswith("stages of unlike width: ") and "faster than" in line for line in found.best.why)


@pytest.mark.parametrize(
    ("total", "rates", "wanted"),
    [(10, [1, 1], [5, 5]), (9, [2, 1], [6, 3]), (5, [9, 1, 1], [3, 1, 1]), (4, [1, 3], [1, 3])],
)
def test_layers_are_shared_by_speed(total: int, rates: list[float], wanted: list[int]) -> None:
    numbers = np.arange(1, total + 1)
    assert share([1] * len(rates), total, 1, [numbers / rate for rate in rates]) == [[count] for count in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_widths_take_less_than_their_bound(seed: int) -> None:
    random = np.random.default_rng(seed)
    devices = random.choice(["H100-SXM-80GB", "A100-SXM-80GB", "L4-24GB", "V100-SXM-32GB"], size=2, replace=False)
    nodes, per_node = random.choice([1, 2], size=2), random.choice([2, 3, 4, 8], size=2)
    groups = [(str(device), int(n), int(each)) for device, n, each in zip(devices, nodes, per_node, strict=True)]
    job = Job(sequence_length=2048, global_batch_size=int(random.choice([8, 12, 32])), precision="fp16")
    engine = {"name": "ahp", "compile": bool(random.random() < 0.5)}
    used = problem(analyze("llama3-8b", job), cluster_of(*groups, gbps=400), job, {}, engine)
    [space] = spaces_of(used)
    at_least_s, finder = ShapeFloors(used.mixed_pricer, space).of_any_widths_s(), _Finder(used)
    promises = sorted(finder.promising([]), key=lambda one: one.pipeline_s)
    some = random.choice(len(promises), size=8, replace=False).tolist()
    layouts = [finder.layout(promises[at]) for at in {*range(8), *some}]
    times = [used.price(layout.model_copy(update={"activation_checkpoint": "none"})).step_time_s for layout in layouts]
    assert 0.3 * min(times) < at_least_s < min(times)
