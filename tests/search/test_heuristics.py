"""Annealing and evolution: every point is a legal layout, a budget is kept, a seed repeats, and the exact best is found
on a space that is small enough to exhaust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.model import Cluster
from ahp.errors import BadInput, NothingFits
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.search.encoding import NUM_GENES, Cube, Objective, anneal, evolve
from ahp.search.method import Method, MethodName
from ahp.search.problem import Problem, problem
from ahp.search.ranking import search
from ahp.search.space import Space, build

JOB = Job(sequence_length=128, global_batch_size=16)
SOLVERS = (anneal, evolve)


@cache
def tiny() -> ModelGraph:
    return analyze("tiny", JOB)


@cache
def asked(engine: str = "megatron") -> Problem:
    return problem(tiny(), "2x4xH100-SXM-80GB", JOB, None, {"name": engine})


@cache
def space(engine: str = "megatron") -> Space:
    return build(asked(engine))


def solved(solver: Callable[[Objective, int], None], seed: int, budget: int) -> Objective:
    objective = Objective(
        Cube(space()), lambda place: asked().price(space().layout(*place)), asked().capacity_bytes, budget
    )
    solver(objective, seed)
    return objective


@pytest.mark.slow
@given(
    st.lists(st.floats(0, 1), min_size=NUM_GENES, max_size=NUM_GENES),
    st.sampled_from(["ahp", "megatron", "torchtitan"]),
)
@settings(max_examples=60, deadline=None)
def test_every_point_is_a_legal_layout(point: list[float], engine: str) -> None:
    block, row = Cube(space(engine)).place(point)
    assert 0 <= row < len(space(engine).rows(block))
    asked(engine).price(space(engine).layout(block, row))


@pytest.mark.slow
def test_every_block_has_a_point() -> None:
    cube, random = Cube(space()), np.random.default_rng(0)
    found = Counter(cube.place(random.random(NUM_GENES))[0] for _ in range(20_000))
    assert set(found) == set(range(len(space().blocks)))


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_budget_is_kept_and_a_seed_repeats(solver: Callable[[Objective, int], None]) -> None:
    first, again, other = (solved(solver, seed, 60) for seed in (1, 1, 2))
    assert len(first.outcome.fitting) + len(first.outcome.misfits) + len(first.outcome.refused) <= 60
    assert first.outcome.fitting == again.outcome.fitting
    assert first.outcome.fitting != other.outcome.fitting


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_small_space_gives_its_best(solver: Callable[[Objective, int], None]) -> None:
    best = min(forecast.step_time_s for forecast in map(asked().price, space()) if forecast.fits)
    found = [min(f.step_time_s for _, f in solved(solver, seed, 600).outcome.fitting) for seed in range(3)]
    assert min(found) >= best
    assert min(found) == pytest.approx(best, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["anneal", "evolve"])
def test_the_verb_ranks_what_they_priced_and_proves_nothing(name: MethodName) -> None:
    ranking = search(tiny(), "2x4xH100-SXM-80GB", JOB, method=Method(name, seed=3, budget=80))
    certificate = ranking.certificate
    assert certificate.forecasts <= 80
    legal = certificate.alike + certificate.not_fit + certificate.fit + certificate.left
    assert certificate.broken + legal == certificate.rows
    assert not certificate.proven
    priced = certificate.forecasts + certificate.cuts + certificate.lightened
    assert f"; {priced:,} forecast in full by " in ranking.proof[0]
    assert ranking.proof[2].startswith("proven: nothing: a")
    exact = search(tiny(), "2x4xH100-SXM-80GB", JOB).certificate
    assert certificate.lowest_bound_left_s is not None
    assert certificate.lowest_bound_left_s <= exact.best_s <= certificate.best_s
    assert ranking.best.forecast is not None
    assert ranking.best.forecast.fits


@pytest.mark.parametrize(
    ("keys", "says"),
    [({"name": "guess"}, "method = 'guess'"), ({"budget": 0}, "budget = 0"), ({"seed": -1}, "seed = -1")],
)
def test_methods_that_are_none(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Method(**keys)


@pytest.mark.slow
def test_a_budget_that_finds_nothing_that_fits_is_told() -> None:
    group = Cluster.parse("2x4xH100-SXM-80GB").groups[0]
    device = group.device.model_copy(update={"memory_bytes": 60 * 2**20, "reserved_memory_bytes": 0})
    cluster = Cluster(groups=(group.model_copy(update={"device": device}),))
    with pytest.raises((BadInput, NothingFits)) as told:
        search(tiny(), cluster, JOB, method=Method("anneal", budget=1), engine={"name": "megatron"})
    assert "method = 'anneal'" in str(told.value) or "fits" in str(told.value)


def test_what_does_not_fit_stands_behind_what_does() -> None:
    roomless = Objective(Cube(space()), lambda place: asked().price(space().layout(*place)), 1, 1000)
    point = np.full(NUM_GENES, 0.5)
    fits = roomless(point)
    forecast = roomless.outcome.fitting[0][1]
    unfit = Objective(
        Cube(space()), lambda _: forecast.model_copy(update={"fits": False}), sum(forecast.memory.values()) // 2, 1000
    )
    assert unfit(point) > fits + 9
    assert fits == pytest.approx(np.log(forecast.step_time_s))
