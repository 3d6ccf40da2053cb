"""Shapes near a fast one: legal, found again from each other, and worth looking at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.search.mixed.find import Budget, Finder
from ahp.search.mixed.nearby_shapes import NearbyShapes
from ahp.search.mixed.space import SEVERAL, Alike, MixedSpace, Shape, shape_of
from ahp.search.problem import Problem

from .test_mixed import A100, H100, cluster_of, mixed, problems

SEED = Shape(Alike(1, False, 1, 1, 1, 1, 0, "none"), 2, 8, "1F1B")


def legal_shapes(space: MixedSpace) -> Iterator[Shape]:
    for alike in space.alike:
        total = space.micro_batches(alike)
        grid = space.grid(alike.width, total)
        for p, r in np.stack([grid.pipeline, grid.replicas], axis=1).tolist():
            for schedule in space.schedules(p):
                there = schedule != SEVERAL or space.pipes(p)
                if there and total >= r:
                    yield Shape(alike, p, r, schedule)


@settings(max_examples=3, deadline=None)
@given(problems(most_cells=6), st.data())
def test_what_is_near_is_legal(asked: Problem, data: st.DataObject) -> None:
    space = MixedSpace(asked)
    legal = list(legal_shapes(space))
    nearby = NearbyShapes(space)
    shape = data.draw(st.sampled_from(legal))
    near = list(nearby.of(shape))
    assert shape not in near
    assert len(near) == len(set(near))
    assert set(near) <= set(legal)
    assert shape_of(shape.layout()) == shape


def test_a_shape_without_a_pipeline_is_near_pipelines_of_its_schedule() -> None:
    space = MixedSpace(mixed(cluster_of((H100, 1, 8), (A100, 1, 8)), batch=48))
    alone = Shape(Alike(1, False, 1, 1, 1, 2, 1, "none"), 1, 8, "1F1B")
    assert {shape.schedule for shape in NearbyShapes(space).of(alone) if shape.pipeline > 1} == {"1F1B"}


@pytest.mark.slow
def test_the_search_goes_on_from_shapes_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the two nearest does: before, the search for neighbors ended there."""
    asked = mixed(cluster_of((H100, 1, 8), (A100, 1, 8)), batch=48)
    finder = Finder(asked, MixedSpace(asked), Budget(near=6, several=0), float("inf"))
    looked: list[Shape] = []

    def none_fits(shape: Shape) -> float:
        finder._seen.add(shape)
        looked.append(shape)
        return float("inf")

    monkeypatch.setattr(finder, "_look_at", none_fits)
    monkeypatch.setattr(finder._near, "of", lambda shape: [replace(shape, pipeline=shape.pipeline + 1)])
    finder._look_nearby([SEED])
    assert [shape.pipeline for shape in looked] == [3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_what_is_near_a_seed_is_priced_and_counted() -> None:
    fixed = {"micro_batch_size": 1, "activation_checkpoint": "none"}
    asked = mixed(cluster_of((H100, 1, 8), (A100, 1, 8)), batch=48, constraints=fixed)
    space = MixedSpace(asked)
    outcome, without = (
        Finder(asked, space, Budget(shapes=0, exact=0, forecasts=0, near=near), float("inf")).run(10, [SEED])
        for near in (30, 0)
    )
    for layout, forecast in outcome.fitting:
        assert asked.price(layout) == forecast
        assert forecast.fits
    times_s = [forecast.step_time_s for _, forecast in outcome.fitting]
    assert times_s == sorted(times_s)
    assert outcome.floor_s <= times_s[0]
    assert 0 < outcome.placed <= outcome.forecasts
    assert not without.fitting
    assert without.left == outcome.left + outcome.placed
    assert without.floor_s == pytest.approx(outcome.floor_s, rel=1e-12)
