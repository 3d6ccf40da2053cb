"""All bounds stay under the forecast, on every kind of layout; that is what makes the certificate true."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ahp.arrays import Floats
from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.engines.registry import names
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import Forecast, Parallelism
from ahp.schedule.stages import layers_of_stages
from ahp.search.bounds import space_bounds
from ahp.search.bounds.block_bounds import block_bounds_s
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.exact import Place
from ahp.search.lighten import ways_of
from ahp.search.problem import Problem, problem
from ahp.search.space import Space, build
from tests.examples import many

from .small import MODELS, SHORT, TRAINED, cpu_workers, problems, small

ROUNDING = 1 + 1e-9


def holds(asked: Problem, space: Space, places: list[Place]) -> None:
    """Every bound of these rows is under their forecast, and those of their blocks under theirs."""
    bounds = Bounds(asked, space)
    most, blocks_s, blocks_bytes = (
        bounds.most_that_fits_bytes(),
        blocks_with_or_without_room_s(bounds),
        bounds.blocks_bytes(),
    )
    for block, row in places:
        rows, layout = bounds.rows(block, np.inf), space.layout(block, row)
        forecast = asked.price(layout)
        needed = sum(forecast.memory.values())
        assert rows.times_s[row] <= forecast.step_time_s * ROUNDING, layout.short()
        assert blocks_s[block] <= forecast.step_time_s * ROUNDING, layout.short()
        assert rows.needs_bytes[row] <= needed + 1, layout.short()
        assert blocks_bytes[block] <= needed + 1, layout.short()
        assert forecast.fits == (needed <= most)
        work_s = float(bounds.work_s([block])[0])
        assert work_s <= forecast.step_time_s * ROUNDING, layout.short()
        if forecast.fits:
            for level in bounds.levels(bounds.first_s()):
                assert level(block) <= forecast.step_time_s * ROUNDING, layout.short()
        if 1 < layout.num_stages <= asked.graph.num_layers:
            any_cut_s = bounds.of_any_cut([block])[block]
            for cut, of_cut in other_cuts(asked, layout):
                assert max(blocks_s[block], work_s) <= of_cut.step_time_s * ROUNDING, cut
                assert blocks_bytes[block] <= sum(of_cut.memory.values()) + 1, cut
                assert not of_cut.fits or any_cut_s <= of_cut.step_time_s * ROUNDING, cut


def blocks_with_or_without_room_s(bounds: Bounds) -> Floats:
    """Lower bound in seconds of every row of each block, whether it fits or not."""
    which = np.arange(len(bounds.space.blocks))
    return block_bounds_s(bounds.problem, bounds.space, bounds._pipelines, which, bounds._copies_s)[1]


def other_cuts(asked: Problem, layout: Parallelism) -> Iterator[tuple[Parallelism, Forecast]]:
    """The layout with all that can be on one stage on the first, or on the last."""
    stages = layout.num_stages
    for longest in {0, stages - 1}:
        layers = [1] * stages
        layers[longest] += asked.graph.num_layers - stages
        cut = layout.model_copy(update={"layers_per_stage": tuple(layers)})
        if not asked.refused(cut):
            yield cut, asked.price(cut)


def some_rows(space: Space, data: st.DataObject, count: int) -> list[Place]:
    found = []
    for _ in range(count):
        block = data.draw(st.integers(0, len(space.blocks) - 1))
        found.append((block, data.draw(st.integers(0, int(space.blocks.rows[block]) - 1))))
    return found


@pytest.mark.slow
def test_bounds_hold_where_expert_ranks_span_tensor_ranks() -> None:
    asked = small("experts", "2x4xH100-SXM-80GB", engine="megatron")
    space = build(asked)
    of = space.blocks
    spans = np.flatnonzero((of.expert > 1) & (of.data * of.context % of.expert > 0))
    assert len(spans)
    assert (of.sequence_parallel[spans] == 1).all()
    places = [(int(block), int(of.rows[block]) - 1) for block in spans[:: max(1, len(spans) // 6)]]
    holds(asked, space, places)
    divided = small("experts", "2x4xH100-SXM-80GB", engine="megatron", constraints={"expert_tensor_parallel_degree": 2})
    of = build(divided).blocks
    assert set(of.tensor.tolist()) == {2}
    assert (of.data * of.context % of.expert == 0).all()


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # models are traced within
@given(problems(), st.data())
def test_bounds_are_under_the_forecast(asked: Problem, data: st.DataObject) -> None:
    space = build(asked)
    if len(space.blocks):
        holds(asked, space, some_rows(space, data, 3))


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_bounds_are_under_the_forecast_where_experts_are_alone(data: st.DataObject) -> None:
    asked = small("experts", "2x2xH100-SXM-80GB", precision="fp32", constraints={"expert_parallel_degree": 2})
    holds(asked, (space := build(asked)), some_rows(space, data, 3))


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["4xA100-SXM-40GB", "2x2xH100-SXM-80GB"]), st.data())
def test_bounds_are_under_the_forecast_of_packed_documents(cluster: str, data: st.DataObject) -> None:
    """Where ranks share sequences, one method goes by the lengths of documents and the other needs masks."""
    asked = small("llama", cluster, packed=True)
    assert asked.graph.by_lengths is not None
    space = build(asked)
    shared = np.flatnonzero(space.blocks.context > 1).tolist()
    places = [(block, 0) for block in data.draw(st.permutations(shared))[:4]]
    holds(asked, space, [*places, *some_rows(space, data, 3)])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft (the extra lora) is not installed")
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["llama", "two kinds of blocks", "experts"]),
    st.sampled_from(["4xA100-SXM-40GB", "2x4xA100-SXM-80GB"]),
    st.sampled_from(["adamw", "muon"]),
    st.sampled_from(["bf16", "fp32"]),
    st.data(),
)
def test_bounds_are_under_the_forecast_of_adapters(
    model: str, cluster: str, optimizer: str, precision: str, data: st.DataObject
) -> None:
    asked = small(model, cluster, optimizer=optimizer, precision=precision, adapted=True)
    holds(asked, space := build(asked), some_rows(space, data, 3))
    holds_in_part(asked, space, some_rows(space, data, 2), data)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(list(MODELS)),
    st.sampled_from(["4xA100-SXM-40GB", "2x4xA100-SXM-80GB"]),
    st.sampled_from(["ahp", "torchtitan"]),
    st.data(),
)
def test_bounds_are_under_the_forecast_of_states_in_16_bits(
    model: str, cluster: str, engine: str, data: st.DataObject
) -> None:
    asked = small(model, cluster, engine=engine, dtype="bf16")
    holds(asked, space := build(asked), some_rows(space, data, 3))
    holds_in_part(asked, space, some_rows(space, data, 2), data)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(MODELS)), st.sampled_from([(4, 2), (6, 2), (4, 3)]), st.sampled_from([4, 8]), st.data())
def test_bounds_are_under_the_forecast_of_workers_that_share_cores(
    model: str, workers: tuple[int, int], batch: int, data: st.DataObject
) -> None:
    asked = small(model, cpu_workers(*workers), batch=batch)
    holds(asked, space := build(asked), pipelines(space, data, 4))
    holds_in_part(asked, space, pipelines(space, data, 2), data)


def pipelines(space: Space, data: st.DataObject, count: int) -> list[Place]:
    """Rows with several pipeline ranks."""
    blocks = np.flatnonzero(space.blocks.pipeline > 1).tolist()
    found = [data.draw(st.sampled_from(blocks)) for _ in range(count if blocks else 0)]
    return [(block, data.draw(st.integers(0, int(space.blocks.rows[block]) - 1))) for block in found]


@pytest.mark.slow
@settings(max_examples=many(80), deadline=None)
@given(problems(), st.data())
def test_bounds_are_under_the_forecast_of_many_problems(asked: Problem, data: st.DataObject) -> None:
    space = build(asked)
    if len(space.blocks):
        holds(asked, space, some_rows(space, data, 4))


def holds_in_part(asked: Problem, space: Space, places: list[Place], data: st.DataObject) -> int:
    """The floor under every part of the layers that may be recomputed, in every cut, is under the forecast of some that fit."""
    bounds, ways, seen = Bounds(asked, space), ways_of(asked), 0
    for block, row in places if ways is not None else ():
        layout = space.layout(block, row)
        if layout.activation_checkpoint == "none" or layout.num_stages > asked.graph.num_layers:
            continue
        for whole in (layout, *(cut for cut, _ in other_cuts(asked, layout))):
            layers = layers_of_stages(whole, asked.graph.num_layers, ends=asked.stage_ends)
            alike = data.draw(st.integers(0, min(layers)))
            some = (
                (alike,) * len(layers)
                if asked.engine.name == "megatron"
                else data.draw(st.tuples(*(st.integers(0, n) for n in layers)))
            )
            part = whole.model_copy(update={"recomputed_layers_per_stage": some})
            if asked.refused(part) is None and (forecast := asked.price(part)).fits:
                assert ways is not None
                assert bounds.of_any_part([block], ways)[block] <= forecast.step_time_s * ROUNDING, part.short()
                seen += 1
    return seen


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.data())
def test_the_floor_under_parts_that_are_recomputed(asked: Problem, data: st.DataObject) -> None:
    space = build(asked)
    if len(space.blocks):
        holds_in_part(asked, space, some_rows(space, data, 3), data)


@pytest.mark.slow
@settings(max_examples=many(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.data())
def test_the_floor_under_parts_that_are_recomputed_of_many_problems(asked: Problem, data: st.DataObject) -> None:
    space = build(asked)
    if len(space.blocks):
        holds_in_part(asked, space, some_rows(space, data, 4), data)


@pytest.mark.parametrize("engine", names())
def test_memory_is_known_before_the_forecast(engine: str) -> None:
    """What rows need is asked of the functions that the forecast asks: but for few schedules it is the same, to the byte."""
    asked = small("two kinds of blocks", "2x2xH100-SXM-80GB", engine=engine)
    space = build(asked)
    bounds = Bounds(asked, space)
    alike = []
    for block in range(0, len(space.blocks), max(1, len(space.blocks) // 8)):
        row = 7 * block % int(space.blocks.rows[block])
        needed = sum(asked.price(space.layout(block, row)).memory.values())
        alike.append(bounds.needs_bytes(block)[row] == needed)
    assert np.mean(alike) >= 0.75


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", names())
def test_time_bound_is_worth_something(model: str, engine: str) -> None:
    """A bound far below the forecast would be right and useless: the median of the share it knows."""
    asked = small(model, "2x4xH100-SXM-80GB", engine=engine, batch=16)
    space = build(asked)
    bounds = Bounds(asked, space)
    share = []
    for block in range(0, len(space.blocks), max(1, len(space.blocks) // 8)):
        row = 7 * block % int(space.blocks.rows[block])
        known_s = bounds.rows(block, np.inf).times_s[row]
        share.append(known_s / asked.price(space.layout(block, row)).step_time_s)
    assert np.median(share) > 0.9


@pytest.mark.slow
def test_blocks_are_bounded_together_as_alone() -> None:
    asked = small("two kinds of blocks", "2x4xH100-SXM-80GB", batch=16)
    space = build(asked)
    bounds = Bounds(asked, space)
    work, closest = bounds.levels(bounds.first_s())
    blocks = range(0, len(space.blocks), len(space.blocks) // 30)
    for block in blocks:
        work(block)  # so that it waits for its closer bound
    for block in blocks:
        _, alone = Bounds(asked, space).levels(
            np.where(np.arange(len(space.blocks)) == block, bounds.first_s(), np.inf)
        )
        assert closest(block) == pytest.approx(alone(block), rel=1e-12)


def test_rows_that_are_bounded_later_are_bounded_as_alone() -> None:
    """A block keeps the bounds of rows that fit, and adds those of others when it is asked for more memory."""
    asked = small("llama", "2x4xH100-SXM-80GB", batch=16)
    space = build(asked)
    bounds, more = Bounds(asked, space), 0
    for block in range(0, len(space.blocks), max(1, len(space.blocks) // 8)):
        needs = bounds.needs_bytes(block)
        few = bounds.rows(block, float(np.median(needs))).times_s
        every, alone = (one.rows(block, np.inf).times_s for one in (bounds, Bounds(asked, space)))
        assert every.tolist() == alone.tolist()
        assert few.tolist() == np.where(needs <= np.median(needs), alone, np.inf).tolist()
        more += int(np.isinf(few).sum())
    assert more


def test_the_order_of_blocks_does_not_depend_on_where_objects_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of floats depend on their neighbours in a product of matrices, so another order can count another row as too large."""
    asked, orders = small("llama", "2x4xA100-SXM-80GB"), []
    of_rows_s = space_bounds.CutBounds.of_rows_s

    def spied(self: space_bounds.CutBounds, most_bytes: float) -> Floats:
        orders.append([(block.p, block.m, block.rows.pipes) for block in self.blocks])
        return of_rows_s(self, most_bytes)

    monkeypatch.setattr(space_bounds.CutBounds, "of_rows_s", spied)
    for order in (id, lambda one: -id(one)):
        monkeypatch.setattr(space_bounds, "id", order, raising=False)
        bounds = Bounds(asked, build(asked))
        bounds.that_may_fit(list(range(len(bounds.space.blocks))))
    assert len(orders) > 1
    assert orders[: len(orders) // 2] == orders[len(orders) // 2 :]


def test_only_blocks_that_are_searched_are_bounded() -> None:
    asked = small(cluster="2x2xH100-SXM-80GB")
    space = build(asked)
    bounds, wanted = Bounds(asked, space), space.blocks.tensor == 1
    work, closest = bounds.levels(np.where(wanted, bounds.first_s(), np.inf))
    blocks = np.flatnonzero(wanted & np.isfinite(bounds.first_s()))[::9].tolist()
    found = [closest(block) for block in blocks]
    assert all(wanted[block] for level in (work, closest) for block in level.known)
    _, alone = Bounds(asked, space).levels(bounds.first_s())
    assert found == pytest.approx([alone(block) for block in blocks], rel=1e-12)


def test_blocks_with_other_kinds_of_recompute_are_bounded_together() -> None:
    asked = small("experts", "2x2xH100-SXM-80GB", compiled=True)
    space = build(asked)
    bounds = Bounds(asked, space)
    work, closest = bounds.levels(bounds.first_s())
    assert len({space.rows(block).recompute for block in range(len(space.blocks))}) == 2
    for block in range(len(space.blocks)):
        work(block)  # so that it waits for its closer bound
    found = [closest(block) for block in range(len(space.blocks))]
    for block in range(0, len(space.blocks), 9):
        assert found[block] <= asked.price(space.layout(block, 0)).step_time_s * ROUNDING


def test_where_no_block_fits_no_bound_is_finite() -> None:
    for memory_bytes, fits in ((2_050_000_000, True), (100_000, False)):
        asked = small(memory_bytes=memory_bytes)
        assert np.isfinite(Bounds(asked, build(asked)).first_s()).any() == fits


def test_rows_that_do_not_fit_are_not_timed() -> None:
    asked = small()
    space = build(asked)
    rows = Bounds(asked, space).rows(0, 0.0)
    assert np.isinf(rows.times_s).all()
    assert np.isfinite(rows.needs_bytes).all()


@pytest.mark.parametrize("engine", ["ahp", "megatron", "torchtitan"])
def test_gathers_between_nodes_are_bounded_as_the_engine_does_them(engine: str) -> None:
    """Tensor ranks on four nodes, where collectives take most of the step: not all engines gather inputs again in the backward pass."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 4096}
    job = Job(sequence_length=2048, global_batch_size=2, precision="bf16")
    model = analyze({"model_type": "llama", "num_hidden_layers": 6, **sizes}, job)
    given = Constraints(tensor_parallel_degree=8, micro_batch_size=2)
    asked = problem(model, Cluster.parse("4x2xA100-SXM-80GB@100"), job, given, {"name": engine, "compile": False})
    space = build(asked)
    bounds = Bounds(asked, space)
    for block, first_s in enumerate(bounds.first_s().tolist()):
        rows = range(int(space.blocks.rows[block]))
        assert first_s <= min(asked.price(space.layout(block, row)).step_time_s for row in rows) * ROUNDING


LEVELS = [
    (TRAINED, 4096, {"first": 0.865, "work": 0.94, "block": 0.95, "rows": 0.999}),
    (SHORT, 256, {"work": 0.93, "block": 0.93, "rows": 0.999}),
]
"""What each level of bounds knows at least of the time of a block's fastest row, as the median over blocks. The first three do not count copies of
gradients of the embedding and the head, and the first not what products of weight gradients write, nor the host."""


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "sequence_length", "levels"), LEVELS)
def test_each_level_of_bounds_is_worth_something(
    sizes: dict[str, int], sequence_length: int, levels: dict[str, float]
) -> None:
    job = Job(sequence_length=sequence_length, global_batch_size=64, precision="bf16")
    model = analyze({"model_type": "llama", "num_hidden_layers": 8, "vocab_size": 32000, **sizes}, job)
    asked = problem(model, Cluster.parse("2x8xH100-SXM-80GB"), job, None, "torchtitan")
    space = build(asked)
    bounds = Bounds(asked, space)
    most_bytes, shares = bounds.most_that_fits_bytes(), []
    for block in range(0, len(space.blocks), len(space.blocks) // 16):
        rows_s = bounds.rows(block, most_bytes).times_s
        if np.isinf(rows_s).all():
            continue
        best_s = float("inf")
        for row in np.argsort(rows_s, kind="stable").tolist():
            if rows_s[row] < best_s:
                best_s = min(best_s, asked.price(space.layout(block, row)).step_time_s)
        closer = (level(block) for level in bounds.levels(bounds.first_s()))
        shares.append([one / best_s for one in (bounds.first_s()[block], *closer, rows_s.min())])
        assert max(shares[-1]) <= ROUNDING
    medians = dict(zip(("first", "work", "block", "rows"), np.median(shares, axis=0).tolist(), strict=True))
    assert all(medians[level] >= floor for level, floor in levels.items()), medians
