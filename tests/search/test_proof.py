"""The search as a whole: it finds what pricing every layout finds, and more generous hardware is never slower."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ahp.cluster.model import Cluster
from ahp.errors import AhpError, NothingFits
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.feasible_space import legal_rows
from ahp.search.method import Method, find
from ahp.search.problem import Problem, problem, with_devices
from ahp.search.ranking import search
from ahp.search.result import Ranking
from ahp.search.stages import WORTH_S
from ahp.search.ties import TIED
from tests.examples import many

from .small import RESOURCES, cpu_workers, problems, small, times_faster, with_memory

FEW = ("1xH100-SXM-80GB", "2xH100-SXM-80GB", "3xA100-SXM-40GB", "2x2xH100-SXM-80GB")
MOST_PRICED = 150
"""Layouts that brute force prices for one problem."""


def found(asked: Problem, keep: int = 10) -> Ranking | None:
    """The ranking; None where nothing fits or nothing is legal."""
    try:
        return search(
            asked.graph, asked.cluster, asked.job, constraints=asked.constraints, engine=asked.engine, keep=keep
        )
    except (NothingFits, AhpError):
        return None


def equals_brute_force(asked: Problem, keep: int) -> None:
    try:
        table = legal_rows(asked)
    except AhpError:
        assert found(asked) is None
        return
    assume(table.space.num_legal <= MOST_PRICED)
    forecasts = [table.problem.price(layout) for layout in table.space]
    times = sorted(forecast.step_time_s for forecast in forecasts if forecast.fits)
    outcome = find(table.problem, Bounds(table.problem, table.space), Method("exact"), keep)
    assert outcome.proven
    assert [forecast.step_time_s for _, forecast in outcome.fitting[:keep]] == pytest.approx(times[:keep], rel=1e-12)
    assert outcome.priced + outcome.too_large + outcome.left == table.space.num_legal
    assert not outcome.refused
    ranking = found(asked, keep)
    assert (ranking is None) == (not times)
    if ranking is None:
        return
    certificate = ranking.certificate
    assert certificate.proven
    legal = certificate.alike + certificate.not_fit + certificate.fit + certificate.left
    assert certificate.broken + legal == certificate.rows
    for plan in ranking:
        assert plan.forecast is not None
        assert plan.parallelism.world_size == table.problem.cluster.num_devices
        assert table.problem.price(plan.parallelism) == plan.forecast
    assert ranking.fastest.forecast is not None
    assert ranking.fastest.forecast.step_time_s <= times[0] * (1 + 1e-12)
    assert ranking.best.forecast is not None
    assert ranking.best.forecast.step_time_s <= times[0] * (1 + TIED)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(problems(FEW, constrained=True), st.sampled_from([1, 3, 10]))
def test_exact_search_is_brute_force(asked: Problem, keep: int) -> None:
    equals_brute_force(asked, keep)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from([(2, 1), (3, 2), (4, 2)]), st.sampled_from([2, 4, 6]), st.sampled_from(["llama", "tied gpt2"]),
    st.sampled_from([1, 10]),
)  # fmt: skip
def test_exact_search_is_brute_force_where_workers_share_cores(
    workers: tuple[int, int], batch: int, model: str, keep: int
) -> None:
    only = {"context_parallel_degree": 1, "activation_checkpoint": "none"}
    equals_brute_force(small(model, cpu_workers(*workers), batch=batch, constraints=only), keep)


@pytest.mark.slow
@settings(max_examples=many(60), deadline=None)
@given(problems(FEW, constrained=True), st.sampled_from([1, 3, 10]))
def test_exact_search_is_brute_force_on_many_problems(asked: Problem, keep: int) -> None:
    equals_brute_force(asked, keep)


def generous(cluster: Cluster, kind: str) -> Cluster:
    if kind == "memory":
        return with_memory(cluster, 2 * cluster.groups[0].device.memory_bytes)
    kinds = ("links in a node", "links between nodes") if kind == "links" else (kind,)
    return times_faster(cluster, dict.fromkeys(kinds, 2.0))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(problems(constrained=True), st.sampled_from(["memory", "links", "arithmetic"]))
def test_more_generous_hardware_is_never_slower(asked: Problem, kind: str) -> None:
    before, after = found(asked, 1), found(asked.on(generous(asked.cluster, kind)), 1)
    if before is None:
        return
    assert after is not None
    # Where not all devices can be used, fewer can be faster.
    if after.certificate.found_s >= before.certificate.found_s:
        assert after.fastest.parallelism.world_size >= before.best.parallelism.world_size
    # Under fixed patterns. A cut into stages that shortens the step by less than WORTH_S is not taken.
    assert after.certificate.found_s <= before.certificate.found_s * (1 + WORTH_S)


SLOWER = st.fixed_dictionaries({name: st.sampled_from([1.0, 0.1, 0.01, 0.001, 0.0001]) for name in RESOURCES})
"""Clusters on which the step waits for something else each time."""
MOST_COMPARED = 40


def never_slower(asked: Problem, by: dict[str, float], faster: str, first: int) -> None:
    """Layout by layout, some of all from ``first`` on."""
    try:
        table = legal_rows(asked.on(times_faster(asked.cluster, by)))
    except AhpError:
        return
    before = table.problem
    after = before.on(times_faster(before.cluster, {faster: 2.0}))
    layouts = list(table.space)
    for layout in layouts[first % max(len(layouts), 1) :: max(len(layouts) // MOST_COMPARED, 1)]:
        now_s, then_s = after.price(layout).step_time_s, before.price(layout).step_time_s
        assert now_s <= then_s * (1 + 1e-9), layout


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(problems(constrained=True), SLOWER, st.sampled_from(RESOURCES), st.integers(0, 1000))
def test_no_layout_is_slower_where_something_is_faster(
    asked: Problem, by: dict[str, float], faster: str, first: int
) -> None:
    never_slower(asked, by, faster, first)


@pytest.mark.slow
@settings(max_examples=many(30), deadline=None)
@given(problems(constrained=True), SLOWER, st.sampled_from(RESOURCES), st.integers(0, 1000))
def test_no_layout_of_many_is_slower_where_something_is_faster(
    asked: Problem, by: dict[str, float], faster: str, first: int
) -> None:
    never_slower(asked, by, faster, first)


@pytest.mark.parametrize(("recompute", "method"), [("none", "all-to-all"), ("selective", "ring")])
def test_of_ring_and_all_to_all_the_one_with_the_shorter_step_is_taken(recompute: str, method: str) -> None:
    """Selective recompute sends an all-to-all again, and keeps what a ring returned."""
    slow = {"arithmetic": 0.003, "memory bandwidth": 0.005, "links in a node": 0.0002, "links between nodes": 0.08}
    asked = small("llama", times_faster(Cluster.parse("2x4xA100-SXM-80GB"), slow), batch=4)
    layout = Parallelism(
        zero_stage=3, context_parallel_degree=4, pipeline_parallel_degree=2, activation_checkpoint=recompute  # type: ignore[arg-type]
    )  # fmt: skip
    other = {"ring": "all-to-all", "all-to-all": "ring"}[method]
    taken, left = (asked.price(layout.model_copy(update={"context_parallel_method": one})) for one in (method, other))
    assert asked.price(layout) == taken
    assert taken.step_time_s < left.step_time_s
    assert asked.decided(layout).context_parallel_method == method


@pytest.mark.parametrize("slow", [{}, {"links between nodes": 0.02}, {"arithmetic": 0.02, "links in a node": 0.001}])
def test_a_way_of_context_parallelism_that_is_left_out_is_no_faster(slow: dict[str, float]) -> None:
    asked = small("llama", times_faster(Cluster.parse("2x4xA100-SXM-80GB"), slow), batch=8)
    layouts = [layout for layout in legal_rows(asked).space if layout.context_parallel_degree > 1]
    for layout in layouts[:: max(len(layouts) // MOST_COMPARED, 1)]:
        ways = (layout.model_copy(update={"context_parallel_method": way}) for way in ("all-to-all", "ring"))
        each = filter(None, map(asked.price_or_none, ways))
        assert asked.price(layout) == min(each, key=lambda one: (not one.fits, one.step_time_s)), layout


@pytest.mark.parametrize("devices", [1, 5, 7, 13])
@pytest.mark.parametrize("engine", ["ahp", "torchtitan"])
def test_one_device_and_prime_numbers_of_them(devices: int, engine: str) -> None:
    asked = small("llama", f"1x{devices}xH100-SXM-80GB", engine=engine)
    ranking = found(asked)
    assert ranking is not None
    used = ranking.best.parallelism.world_size
    assert used <= devices
    assert (used < devices) == bool(ranking.notes)
    assert legal_rows(asked.on(with_devices(asked.cluster, used))).notes == ()


def test_a_model_without_blocks() -> None:
    job = Job(sequence_length=64, global_batch_size=2)
    asked = problem(
        analyze("tests.graph.small:plain", job),
        Cluster.parse("2xA100-SXM-40GB"),
        job,
        None,
        {"name": "ahp", "compile": False},
    )
    equals_brute_force(asked, 10)


@pytest.mark.slow
def test_more_devices_than_tokens() -> None:
    asked = small("llama", "128x8xH100-SXM-80GB", engine="torchtitan", batch=1)
    ranking = found(asked)
    assert ranking is not None
    assert ranking.best.parallelism.world_size < 1024
    assert "of 1024 devices are used" in ranking.notes[0]
