"""Where it is left open whether blocks are compiled, the search takes what is faster, and says why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ahp.cluster.model import Cluster
from ahp.engines.ahp import AhpEngine
from ahp.engines.traits import Traits
from ahp.errors import AhpError, BadInput, NotExpressible, NothingFits
from ahp.plan import Forecast, Parallelism, Plan
from ahp.search.compiled import compiling
from ahp.search.fastest import fastest
from ahp.search.feasible_space import legal_rows
from ahp.search.problem import Problem
from ahp.search.ranking import search
from ahp.search.result import Ranking
from tests.examples import many

from .small import CLUSTERS, cpu_workers, problems, small

FEW = ("1xH100-SXM-80GB", "2xH100-SXM-80GB", "2x2xH100-SXM-80GB")
MOST_PRICED = 150


def left_open(asked: Problem) -> Problem:
    return replace(asked, engine=asked.engine.model_copy(update={"name": "ahp", "compile": None}))


def with_compile(asked: Problem, value: bool) -> Problem:
    return replace(asked, engine=asked.engine.model_copy(update={"compile": value}))


def ranking_of(asked: Problem, **more: Any) -> Ranking:
    return search(asked.graph, asked.cluster, asked.job, constraints=asked.constraints, engine=asked.engine, **more)


def step_s(plan: Plan) -> float:
    assert plan.forecast is not None
    return plan.forecast.step_time_s


def why(plan: Plan) -> str:
    """The one line about blocks."""
    (line,) = (line for line in plan.why if line.startswith(("compiled blocks: ", "eager blocks: ")))
    return line


def equals_brute_force(asked: Problem) -> None:
    """Every row of both kinds of blocks, priced one by one."""
    best_s, rows = float("inf"), 0
    for one in (with_compile(asked, True), with_compile(asked, False)):
        try:
            one.check()
            table = legal_rows(one)
        except AhpError:
            continue
        assume(table.space.num_legal <= MOST_PRICED)
        rows = table.space.size
        found = [table.problem.price(layout) for layout in table.space]
        best_s = min([best_s, *(forecast.step_time_s for forecast in found if forecast.fits)])
    try:
        ranking = ranking_of(asked, keep=3)
    except AhpError:
        assert best_s == float("inf")
        return
    assert step_s(ranking.fastest) <= best_s * (1 + 1e-12)
    certificate = ranking.certificate
    assert certificate.proven
    assert certificate.rows == rows
    legal = certificate.alike + certificate.not_fit + certificate.fit + certificate.left
    assert certificate.broken + legal == certificate.rows
    assert ranking.best.why[1:4] == ranking.proof
    assert "compiled and eager" in ranking.proof[0]
    for plan in ranking:
        used = replace(asked, engine=plan.engine).on(Cluster.resolve(plan.cluster or {}))
        assert used.price(plan.parallelism) == plan.forecast
    alone = fastest(asked)
    if alone is not None and alone.best is not None:
        # It cuts one layout anew, the ranking three: another of these may be the faster one then.
        assert certificate.found_s * (1 - 1e-12) <= alone.best[1].step_time_s <= best_s * (1 + 1e-12)


@pytest.mark.slow
@settings(max_examples=many(30), deadline=None)
@given(problems(FEW, constrained=True, engines=["ahp"]))
def test_the_best_of_many_is_the_best_of_both_kinds_of_blocks(asked: Problem) -> None:
    equals_brute_force(left_open(asked))


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled blocks that keep the host so busy that no layout gains by them."""
    traits = AhpEngine.traits

    def slow(self: AhpEngine, job: Any, parallelism: Parallelism, choice: Any) -> Traits:
        found = traits(self, job, parallelism, choice)
        return replace(found, host=found.host._replace(launches_per_operator=50.0)) if choice.compile else found

    monkeypatch.setattr(AhpEngine, "traits", slow)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_compiler")
def test_eager_blocks_are_taken_where_they_are_faster() -> None:
    asked = left_open(small(cluster="2xH100-SXM-80GB"))
    ranking = ranking_of(asked)
    assert ranking.best.engine.compile is False
    alone = ranking_of(with_compile(asked, False))
    assert [plan.parallelism for plan in ranking] == [plan.parallelism for plan in alone]
    assert re.match(
        r"eager blocks: the best with compiled ones, dp\S+ .* (is .* slower|takes .* as long): ", why(ranking.best)
    )
    assert ranking.certificate.proven
    assert ranking.certificate.rows == alone.certificate.rows
    assert "compiled and eager" in ranking.proof[0]
    equals_brute_force(left_open(small(cluster="2xH100-SXM-80GB", constraints={"micro_batch_size": 2})))


def test_the_gain_is_that_of_the_same_layout() -> None:
    asked = left_open(small(cluster="2xH100-SXM-80GB"))
    best = ranking_of(asked).best
    assert best.engine.compile is True
    eager_s = with_compile(asked, False).price(best.parallelism).step_time_s
    gain = re.match(r"compiled blocks: (\S+) % faster than the same layout with eager ones, ", why(best))
    assert gain is not None
    assert float(gain[1]) == pytest.approx(100 * (1 - step_s(best) / eager_s), abs=0.6)
    assert "the time to compile" in why(best)


@pytest.mark.slow
def test_what_is_given_is_kept() -> None:
    for value in (True, False):
        best = ranking_of(small(compiled=value)).best
        assert best.engine.compile is value
        assert not any(line.startswith(("compiled blocks", "eager blocks")) for line in best.why)


def test_cpu_workers_stay_eager_and_say_why() -> None:
    asked = left_open(small(cluster=cpu_workers(2, 2), precision="fp32"))
    best = ranking_of(asked, keep=1).best
    assert best.engine.compile is False
    assert why(best).startswith("eager blocks: on a CPU ")
    assert ranking_of(with_compile(asked, True), keep=1).best.engine.compile is True


def test_what_cannot_be_compiled_stays_eager_and_says_why() -> None:
    given = {"activation_checkpoint": "selective", "expert_parallel_degree": 2}
    best = ranking_of(left_open(small("experts", constraints=given)), keep=1).best
    assert best.engine.compile is False
    assert why(best).startswith("eager blocks: activation_checkpoint = 'selective': does not go with engine.compile")


def test_engines_beside_ahps_own_decide_nothing() -> None:
    asked = replace(left_open(small()), engine=small(engine="megatron").engine.model_copy(update={"compile": None}))
    best = ranking_of(asked, keep=1).best
    assert best.engine.compile is False
    assert not any("eager blocks" in line for line in best.why)
    assert compiling(with_compile(asked, False))[0] == with_compile(asked, False)


@pytest.mark.slow
def test_nothing_fits_with_either() -> None:
    with pytest.raises(NothingFits):
        ranking_of(left_open(small(cluster="1xH100-SXM-80GB", memory_bytes=1_000_000)))


def test_every_number_of_devices_has_its_own_blocks() -> None:
    asked = left_open(small(cluster="2xH100-SXM-80GB", constraints={"micro_batch_size": 2}))
    ranking = ranking_of(asked, objective={"name": "cost", "price_per_device_hour": 2.0})
    for plan in ranking:
        assert plan.engine.compile is True
        used = with_compile(asked, True).on(Cluster.resolve(plan.cluster or {}))
        assert used.price(plan.parallelism) == plan.forecast
    assert why(ranking.best).startswith("compiled blocks: ")


def test_where_no_layout_over_groups_is_legal_the_reason_is_told() -> None:
    groups = [{"name": name, "device": name, "devices_per_node": 2} for name in ("H100-SXM-80GB", "A100-SXM-40GB")]
    asked = left_open(small(cluster=Cluster.from_dict({"groups": groups}), batch=4))
    with pytest.raises(
        BadInput, match=r"(?s)over the groups.*global_batch_size 4 must be .*alone: .*micro_batch_size = 3"
    ):
        search(asked.graph, asked.cluster, asked.job, constraints={"micro_batch_size": 3}, engine=asked.engine)


@pytest.mark.slow
def test_a_mixed_cluster_is_searched_with_compiled_blocks_alone_and_says_so() -> None:
    groups = [{"name": name, "device": device, "nodes": 1, "devices_per_node": 1, "inter_node_gbps": 100}
              for name, device in (("a", "H100-SXM-80GB"), ("b", "A100-SXM-80GB"))]  # fmt: skip
    cluster = Cluster.from_dict({"groups": groups, "links": [{"between": ["a", "b"], "gbps": 100}]})
    asked = left_open(small(cluster=cluster, batch=4, constraints={"activation_checkpoint": "none"}))
    best = ranking_of(asked, keep=1).best
    assert best.engine.compile is True
    assert why(best).endswith("other layouts with eager blocks are not searched here")
    assert step_s(best) == step_s(ranking_of(with_compile(asked, True), keep=1).best)


def never_slower(asked: Problem, first: int) -> None:
    """What leaves eager layouts out: but for those that the problem names, compiled blocks take no more time and memory. And what the
    bounds are made of takes no more than either."""
    either = replace(left_open(asked), either_blocks=True)
    try:
        table = legal_rows(either)
    except AhpError:
        return
    either, layouts = table.problem, list(table.space)
    for layout in layouts[first % max(len(layouts), 1) :: max(len(layouts) // 40, 1)]:
        for method in either.context_methods(layout.context_parallel_degree):
            one = layout if method is None else layout.model_copy(update={"context_parallel_method": method})
            least, compiled, eager = (forecast_of(used, one) for used in (either, either.compiled, either.eager))
            found = [forecast for forecast in (compiled, eager) if forecast is not None]
            assert least is not None or not found
            for forecast in found:
                assert least is not None
                no_more(least, forecast)
            if not either.faster_eager(one) and eager is not None:
                assert compiled is not None
                no_more(compiled, eager)


def test_what_an_update_takes_is_not_added_to_what_a_reduction_took_before() -> None:
    """Else compiled blocks, which keep less, would need more memory than eager ones."""
    asked = small("llama", Cluster.parse("4xA100-SXM-40GB"), batch=1)
    optimizer = asked.job.optimizer.model_copy(update={"name": "muon"})
    asked = replace(asked, job=asked.job.model_copy(update={"optimizer": optimizer}))
    layout = Parallelism(tensor_parallel_degree=2, pipeline_parallel_degree=2, pipeline_parallel_schedule="GPipe")
    compiled, eager = (forecast_of(with_compile(asked, blocks), layout) for blocks in (True, False))
    assert compiled is not None
    assert eager is not None
    no_more(compiled, eager)


def forecast_of(asked: Problem, layout: Parallelism) -> Forecast | None:
    try:
        return asked.priced(layout).forecast
    except (BadInput, NotExpressible):
        return None


def no_more(one: Forecast, other: Forecast) -> None:
    assert one.step_time_s <= other.step_time_s * (1 + 1e-9)
    assert sum(one.memory.values()) <= sum(other.memory.values()) * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=many(8), deadline=None)
@given(problems(CLUSTERS, constrained=True, engines=["ahp"]), st.integers(0, 1000))
def test_compiled_blocks_are_never_slower_but_where_the_problem_says_so(asked: Problem, first: int) -> None:
    never_slower(asked, first)
