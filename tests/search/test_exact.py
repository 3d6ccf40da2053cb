"""Best-first pricing against pricing everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.errors import BadInput
from ahp.plan import Forecast
from ahp.search.exact import Limits, Outcome, Place, Price, best_first


def forecast(seconds: float, *, fits: bool = True) -> Forecast:
    return Forecast(
        step_time_s=seconds,
        step_time_low_s=seconds * 0.9,
        step_time_high_s=seconds * 1.1,
        tokens_per_s_per_device=1 / seconds,
        mfu=0.5,
        mfu_peak="bf16",
        memory_allocated_bytes=1,
        memory_reserved_bytes=1,
        fit_probability=1.0 if fits else 0.0,
        fits=fits,
        step={"compute": seconds},
        memory={"parameters": 1},
    )


rows = st.lists(
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 1.0), st.sampled_from(["fits", "misfit", "known misfit"])),
    min_size=1,
    max_size=20,
)
"""Per row: the time, the share of it that the bound knows, whether it fits and whether the bound knows that."""

blocks = st.lists(st.tuples(rows, st.tuples(*[st.floats(0.0, 1.0)] * 3)), min_size=1, max_size=8)
"""Per block: its rows, and the shares of its lowest row's bound that are known of it before it is refined, then, and at last."""


def searched(
    table: list[list[tuple[float, float, bool]]], limits: Limits | None = None, price: Price | None = None
) -> Outcome:
    """Blocks of (time, lower bound, whether it fits), of which all is known from the start."""

    def lowest(block: int) -> float:
        return min(bound for _, bound, _ in table[block])

    return best_first(
        np.array([lowest(block) for block in range(len(table))]),
        np.array([len(block) for block in table]),
        [lowest],
        lambda block: np.array([bound for _, bound, _ in table[block]]),
        price or (lambda place: forecast(table[place[0]][place[1]][0], fits=table[place[0]][place[1]][2])),
        limits,
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(blocks, st.integers(1, 5))
def test_it_finds_what_pricing_everything_finds(
    table: list[tuple[list[tuple[float, float, str]], tuple[float, float, float]]], keep: int
) -> None:
    priced: list[Place] = []

    def row_bounds(block: int) -> np.ndarray:
        return np.array([np.inf if kind == "known misfit" else time * share for time, share, kind in table[block][0]])

    def price(place: Place) -> Forecast:
        priced.append(place)
        time, _, kind = table[place[0]][0][place[1]]
        return forecast(time, fits=kind == "fits")

    lowest = [float(row_bounds(block).min()) for block in range(len(table))]
    known = [sorted(shares) for _, shares in table]
    before = np.array([low if np.isinf(low) else low * of[0] for low, of in zip(lowest, known, strict=True)])
    after = [[low * max(of[at], 0.01) for low, of in zip(lowest, known, strict=True)] for at in (1, 2)]
    sizes = np.array([len(rows) for rows, _ in table])
    refine = [bounds.__getitem__ for bounds in after]
    outcome = best_first(before, sizes, refine, row_bounds, price, Limits(keep=keep))
    expected = sorted(time for rows, _ in table for time, _, kind in rows if kind == "fits")[:keep]
    assert [found.step_time_s for _, found in outcome.fitting[:keep]] == expected
    assert outcome.proven
    assert len(set(priced)) == len(priced) == outcome.priced
    assert outcome.priced + outcome.left + outcome.too_large == sizes.sum()
    for block, bound in enumerate(outcome.bounds_s):
        assert bound <= lowest[block] or np.isinf(lowest[block])


def test_it_prices_no_row_that_cannot_win() -> None:
    outcome = searched([[(1.5, 1.0, True), (5.0, 5.0, True)], [(4.0, 2.0, True)]], Limits(keep=1))
    assert [place for place, _ in outcome.fitting] == [(0, 0)]
    assert outcome.left == 2
    assert outcome.lowest_bound_left_s == 2.0
    assert list(outcome.opened) == [0]


def test_a_limit_is_told_not_hidden() -> None:
    outcome = searched([[(2.0 + row, 1.0, True) for row in range(50)]], Limits(keep=3, proof=10))
    assert outcome.priced == 10
    assert outcome.left == 40
    assert not outcome.proven


def test_a_slack_leaves_what_is_hardly_faster() -> None:
    """By the bounds of its rows: what is left may be 2 % faster than what was found."""
    table = [[(1.0, 0.9, True), (1.2, 0.99, True)], [(0.98, 0.98, True)]]
    assert searched(table, Limits(keep=1)).fitting[0][1].step_time_s == 0.98
    assert searched(table, Limits(keep=1, slack=0.01)).fitting[0][1].step_time_s == 0.98
    loose = searched(table, Limits(keep=1, slack=0.05))
    assert (loose.priced, loose.fitting[0][1].step_time_s, loose.proven) == (1, 1.0, False)


def test_the_table_is_complete_however_many_rows_it_takes() -> None:
    """No number of forecasts ends it: of 400 rows whose bounds say little all are priced that may be among the ten."""
    seconds = [1.5, *(2.0 + (row * 37 % 400) / 400 for row in range(400))]
    outcome = searched([[(time, min(time, 2.01), True)] for time in seconds])
    assert [forecast.step_time_s for _, forecast in outcome.fitting[:10]] == sorted(seconds)[:10]
    assert outcome.priced > 300
    assert outcome.proven


def test_refused_rows_are_kept_with_their_reason() -> None:
    def price(place: Place) -> Forecast:
        if place == (0, 0):
            raise BadInput("tensor_parallel_degree = 3: no")
        return forecast(1.0)

    outcome = searched([[(1.0, 0.1, True), (1.0, 0.2, True)]], price=price)
    assert outcome.refused == [((0, 0), "tensor_parallel_degree = 3: no")]
    assert outcome.priced == 1


def test_nothing_fits() -> None:
    outcome = searched([[(1.0, 0.1, False), (1.0, 0.2, False)]])
    assert outcome.fitting == []
    assert len(outcome.misfits) == 2
    assert outcome.proven
