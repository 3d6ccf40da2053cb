"""A layout whose lower bound shows that it cannot win is not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.errors import BadInput
from ahp.forecast.priced import faster
from ahp.forecast.pricer import Pricer
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.by_speed import _EagerRows
from ahp.search.compiled import compiling
from ahp.search.feasible_space import legal_rows
from ahp.search.method import Method, find
from ahp.search.problem import Problem, problem
from tests.examples import many

from .small import CLUSTERS, problems, small


@pytest.mark.slow
@settings(max_examples=many(12), deadline=None)
@given(problems(CLUSTERS), st.data())
def test_the_bound_of_a_layout_is_below_its_forecast(asked: Problem, data: st.DataObject) -> None:
    try:
        space = legal_rows(asked).space
    except BadInput:
        return
    pricer = asked.pricer
    for _ in range(3):
        block = data.draw(st.integers(0, len(space.blocks) - 1))
        layout = space.layout(block, data.draw(st.integers(0, int(space.blocks.rows[block]) - 1)))
        decided = asked.decided(layout)
        if (bound_s := asked.bound_or_none(decided)) is not None:
            assert bound_s <= pricer.price(decided).forecast.step_time_s * (1 + 1e-12)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Parallelism]:
    """The layouts whose schedules are run, as they are run."""
    found, finished = list[Parallelism](), Pricer._finished

    def spied(self: Pricer, begun: object) -> object:
        found.append(begun.parallelism)  # type: ignore[attr-defined]
        return finished(self, begun)  # type: ignore[arg-type]

    monkeypatch.setattr(Pricer, "_finished", spied)
    return found


def test_of_two_ways_to_share_a_sequence_one_that_cannot_win_is_not_run(run: list[Parallelism]) -> None:
    job = Job(sequence_length=8192, global_batch_size=8, precision="bf16")
    asked = problem(analyze("llama3.2-1b", job), "2x2xH100-SXM-80GB", job, None, {"name": "ahp", "compile": True})
    layout = Parallelism(context_parallel_degree=4, activation_checkpoint="full")
    priced = asked.priced(layout)
    (alone,) = run
    ways = [layout.model_copy(update={"context_parallel_method": way}) for way in asked.pricer.methods(layout)]
    assert len(ways) == 2
    assert priced.parallelism == alone
    assert priced.forecast == faster(map(asked.priced, ways)).forecast


@pytest.mark.slow
def test_eager_blocks_that_cannot_win_are_not_run(run: list[Parallelism]) -> None:
    asked = small("experts", "2x4xA100-SXM-80GB")
    either, _ = compiling(replace(asked, engine=asked.engine.model_copy(update={"compile": None})))
    table = legal_rows(either)
    found = find(either.compiled, Bounds(either, table.space), Method(), 10)
    run.clear()
    eager = _EagerRows.of(either, table.space, found)
    best_s = found.fitting[0][1].step_time_s
    rivals = [rival for place, _ in found.fitting for rival in either.faster_eager(table.space.layout(*place))]
    assert len(run) == eager.forecasts < len(rivals)
    left = [rival for rival in rivals if rival not in run]
    for forecast in map(either.eager.price_or_none, left):
        assert forecast is None or forecast.step_time_s >= best_s
