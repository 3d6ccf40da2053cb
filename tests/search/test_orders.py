"""Orders of the mesh axes: none that places ranks differently is left out, none stands twice, and the best of all is found."""

from __future__ import annotations

from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.model import Cluster
from ahp.engines.registry import get
from ahp.errors import NotExpressible
from ahp.forecast.axes import axes_of
from ahp.forecast.groups import data_groups, expert_groups
from ahp.forecast.mesh import pipeline_axis
from ahp.plan import AXES, DEGREE, Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.by_speed import ranking_with_any_kernels
from ahp.search.feasible_space import legal_rows
from ahp.search.method import Method, find
from ahp.search.orders import Degrees, Order, Orders
from ahp.search.problem import Problem
from ahp.search.ranking import search
from ahp.search.space import build
from tests.examples import many

from .small import small, times_faster


def of_degrees(degrees: dict[str, int], expert: int, order: Order | None) -> Parallelism:
    keys = {DEGREE[axis]: degree for axis, degree in degrees.items()}
    return Parallelism(**keys, expert_parallel_degree=expert, zero_stage=3, mesh_order=order)


def lies(layout: Parallelism, per_node: int) -> object:
    """Every group that the forecast prices."""
    whole = layout.model_copy(update={"zero_stage": 0})
    places = combinations(range(layout.pipeline_parallel_degree), 2)
    return (
        axes_of(layout, per_node),
        [(data_groups(one, per_node), expert_groups(one, per_node)) for one in (layout, whole)],
        [pipeline_axis(layout).pair(*pair, per_node) for pair in places],
    )


def equals_all_orders(degrees: dict[str, int], expert: int, per_node: int, *, even: bool) -> None:
    usual = tuple(axis for axis in AXES if degrees[axis] > 1)
    found = Orders(per_node, lambda _: None).different(Degrees(tuple(degrees[axis] for axis in AXES), expert))
    assert found[0].order is None, "the usual order comes first"
    kept = [str(lies(of_degrees(degrees, expert, one.order), per_node)) for one in found]
    everything = {str(lies(of_degrees(degrees, expert, order), per_node)) for order in permutations(usual)}
    assert set(kept) == everything
    if even:
        assert len(kept) == len(everything), "an order stands twice"


@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.sampled_from([1, 1, 2, 4, 8])] * 5), st.sampled_from([1, 2, 4, 8]))
def test_no_order_is_lost_and_none_stands_twice(degrees: tuple[int, ...], per_node: int) -> None:
    equals_all_orders(dict(zip(AXES, degrees, strict=True)), 1, per_node, even=True)


@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.sampled_from([1, 1, 2, 8, 16, 32])] * 5), st.sampled_from([2, 4, 8]), st.data())
def test_no_order_is_lost_where_experts_lie_on_several_nodes(
    degrees: tuple[int, ...], per_node: int, data: st.DataObject
) -> None:
    """Axes of whole nodes were cut to one node before the ranks that share experts were counted: 16 ranks on a node of eight."""
    sharded = degrees[2] * degrees[3]
    ranks = sharded if sharded > 1 else degrees[1]
    expert = data.draw(st.sampled_from([e for e in (1, 2, 8, 16, 32, 64) if ranks % e == 0]))
    by_axis = dict(zip(AXES, degrees, strict=True))
    equals_all_orders(by_axis, expert, per_node, even=False)
    for one in Orders(per_node, lambda _: None).different(Degrees(degrees, expert)):
        group = axes_of(of_degrees(by_axis, expert, one.order), per_node).expert
        assert expert == 1 or group.local == one.within.expert


@pytest.mark.slow
@settings(max_examples=many(80), deadline=None)
@given(st.tuples(*[st.sampled_from([1, 1, 2, 3, 4, 6, 8])] * 5), st.sampled_from([2, 3, 4, 6, 8]), st.data())
def test_no_order_is_lost_where_axes_fill_no_node(degrees: tuple[int, ...], per_node: int, data: st.DataObject) -> None:
    sharded = degrees[2] * degrees[3]
    # These share the experts: rules.py refuses what does not divide them.
    ranks = sharded if sharded > 1 else degrees[1]
    expert = data.draw(st.sampled_from([e for e in (1, 2, 4, 8) if ranks % e == 0]))
    equals_all_orders(dict(zip(AXES, degrees, strict=True)), expert, per_node, even=False)


@pytest.mark.slow
def test_one_node_and_single_devices_have_one_order() -> None:
    for cluster in ("8xH100-SXM-80GB", "8x1xH100-SXM-80GB"):
        assert not build(small("llama", cluster)).has_orders


def best_of_all_orders(asked: Problem) -> float:
    """Every order of every layout that the search has in some order, priced."""
    times = []
    for layout in {one.model_copy(update={"mesh_order": None}) for one in build(asked)}:
        for order in permutations(layout.axes):
            turned = Parallelism(**layout.model_dump() | {"mesh_order": order or None})
            if asked.refused(turned):
                continue
            forecast = asked.price(turned)
            times += [forecast.step_time_s] * forecast.fits
    return min(times)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"pipeline_parallel_degree": 2, "zero_stage": 1},
        {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
        {"data_parallel_replicate_degree": 2, "zero_stage": 3},
    ],
    ids=str,
)
def test_the_best_of_all_orders_is_found(given: dict) -> None:
    given |= {"micro_batch_size": 1, "activation_checkpoint": "none", "pipeline_parallel_schedule": "1F1B"}
    asked = small("tied gpt2", "2x4xA100-SXM-80GB", batch=8, constraints=given)
    space = build(asked)
    outcome = find(asked, Bounds(asked, space), Method("exact"), 1)
    assert outcome.proven
    assert outcome.fitting[0][1].step_time_s == pytest.approx(best_of_all_orders(asked), rel=1e-12)


def test_an_order_that_is_given_is_kept() -> None:
    order = ("dp_shard", "pp", "tp")
    asked = small("llama", "2x4xH100-SXM-80GB", constraints={"mesh_order": order})
    found = list(build(asked))
    assert {layout.axes for layout in found} == {order}
    ranking = search(asked.graph, asked.cluster, asked.job, constraints={"mesh_order": order})
    assert ranking.best.parallelism.axes == order
    alone = search(asked.graph, asked.cluster, asked.job, constraints=ranking.best.parallelism)
    assert [plan.parallelism for plan in alone] == [ranking.best.parallelism]


def test_megatron_is_given_the_orders_that_it_has() -> None:
    space = build(small("llama", "2x4xH100-SXM-80GB", engine="megatron", batch=16))
    orders = {layout.mesh_order for layout in space if layout.mesh_order is not None}
    places = {axis: at for at, axis in enumerate(("dp_replicate", "dp_shard", "pp", "cp", "tp"))}
    assert orders
    assert all(list(order) == sorted(order, key=places.__getitem__) for order in orders)


def test_an_order_that_the_engine_has_not_is_refused() -> None:
    with pytest.raises(NotExpressible, match="megatron numbers ranks in a fixed order"):
        legal_rows(
            small("llama", "2x4xH100-SXM-80GB", engine="megatron", constraints={"mesh_order": ("tp", "dp_shard")})
        )


@pytest.mark.slow
def test_blocks_say_how_their_ranks_lie() -> None:
    asked = small("experts", "2x4xH100-SXM-80GB", engine="torchtitan", batch=8)
    space = build(asked)
    for block, row in product(range(0, len(space.blocks), 23), (0, -1)):
        layout = space.layout(block, row % int(space.blocks.rows[block]))
        folded = get(asked.engine.name).traits(asked.job, layout, asked.engine).experts.folded
        assert axes_of(layout, 4, folded) == space.axes(block)


def test_the_answer_says_what_a_node_holds() -> None:
    given = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4, "zero_stage": 2}
    slow = {"links between nodes": 0.03, "arithmetic": 0.01, "memory bandwidth": 0.01}
    where = times_faster(Cluster.parse("2x4xA100-SXM-80GB"), slow)
    asked = small("tied gpt2", where, batch=8, constraints=given)
    ranking = ranking_with_any_kernels(asked, 10, None, Method())  # the fastest first; the usual order is tied with it
    assert ranking.best.parallelism.mesh_order == ("dp_shard", "dp_replicate")
    told = [line for line in ranking.best.why if line.startswith("mesh order dp_shard > dp_replicate: ")]
    assert told[0].endswith("a node holds dp_replicate 2 x dp_shard 2")
    assert "with mesh order dp_replicate > dp_shard" in told[1]
