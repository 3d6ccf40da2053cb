"""All bounds stay under the forecast, on every kind of layout; that is what makes the certificate true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.engines.registry import names
from ahp.search.bounds import Bounds
from ahp.search.exact import Place
from ahp.search.problem import Problem
from ahp.search.space import Space, build
from tests.examples import many

from .small import MODELS, problems, small

ROUNDING = 1 + 1e-9


def holds(asked: Problem, space: Space, places: list[Place]) -> None:
    """Every bound of these rows is under their forecast, and those of their blocks under theirs."""
    bounds = Bounds(asked)
    most, blocks_s, blocks_bytes = bounds.most_that_fits_bytes(), bounds.blocks_s(space), bounds.blocks_bytes(space)
    for block, row in places:
        rows, layout = bounds.rows(space, block, np.inf), space.layout(block, row)
        forecast = asked.price(layout)
        needed = sum(forecast.memory.values())
        assert rows.times_s[row] <= forecast.step_time_s * ROUNDING, layout.short()
        assert blocks_s[block] <= forecast.step_time_s * ROUNDING, layout.short()
        assert rows.needs_bytes[row] <= needed + 1, layout.short()
        assert blocks_bytes[block] <= needed + 1, layout.short()
        assert forecast.fits == (needed <= most)
        if forecast.fits:
            assert bounds.block_s(space, block) <= forecast.step_time_s * ROUNDING, layout.short()


def some_rows(space: Space, data: st.DataObject, count: int) -> list[Place]:
    found = []
    for _ in range(count):
        block = data.draw(st.integers(0, len(space.blocks) - 1))
        found.append((block, data.draw(st.integers(0, int(space.blocks.rows[block]) - 1))))
    return found


@settings(max_examples=25, deadline=None)
@given(problems(), st.data())
def test_bounds_are_under_the_forecast(asked: Problem, data: st.DataObject) -> None:
    space = build(asked)
    if len(space.blocks):
        holds(asked, space, some_rows(space, data, 3))


@pytest.mark.slow
@settings(max_examples=many(80), deadline=None)
@given(problems(), st.data())
def test_bounds_are_under_the_forecast_of_many_problems(asked: Problem, data: st.DataObject) -> None:
    space = build(asked)
    if len(space.blocks):
        holds(asked, space, some_rows(space, data, 4))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", names())
def test_time_bound_is_worth_something(model: str, engine: str) -> None:
    """A bound far below the forecast would be right and useless: the median of the share it knows."""
    asked = small(model, "2x4xH100-SXM-80GB", engine=engine, batch=16)
    space, bounds = build(asked), Bounds(asked)
    share = []
    for block in range(0, len(space.blocks), max(1, len(space.blocks) // 8)):
        row = 7 * block % int(space.blocks.rows[block])
        known_s = bounds.rows(space, block, np.inf).times_s[row]
        share.append(known_s / asked.price(space.layout(block, row)).step_time_s)
    assert np.median(share) > 0.9


def test_rows_that_do_not_fit_are_not_timed() -> None:
    asked = small()
    space = build(asked)
    rows = Bounds(asked).rows(space, 0, 0.0)
    assert np.isinf(rows.times_s).all()
    assert np.isfinite(rows.needs_bytes).all()
