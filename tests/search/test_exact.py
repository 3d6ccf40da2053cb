"""Best-first pricing against pricing everything."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.errors import BadInput
from ahp.plan import Forecast
from ahp.search.exact import Limits, best_first


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
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 1.0), st.booleans()),
    min_size=1,
    max_size=60,
)
"""Per row: the time, the share of it that the bound knows, whether it fits."""


@settings(max_examples=150, deadline=None)
@given(rows, st.integers(1, 5))
def test_it_finds_what_pricing_everything_finds(table: list[tuple[float, float, bool]], keep: int) -> None:
    bounds = np.array([time * share for time, share, _ in table])
    priced: list[int] = []

    def price(index: int) -> Forecast:
        priced.append(index)
        return forecast(table[index][0], fits=table[index][2])

    outcome = best_first(bounds, price, Limits(keep=keep))
    expected = sorted(time for time, _, fits in table if fits)[:keep]
    assert [found.step_time_s for _, found in outcome.fitting[:keep]] == expected
    assert outcome.proven
    assert len(set(priced)) == len(priced) == outcome.priced
    assert outcome.priced + outcome.left == len(table)


def test_it_prices_no_row_that_cannot_win() -> None:
    bounds = np.array([1.0, 5.0, 2.0])
    outcome = best_first(bounds, lambda index: forecast([1.5, 5.0, 4.0][index]), Limits(keep=1))
    assert [index for index, _ in outcome.fitting] == [0]
    assert outcome.left == 2
    assert outcome.lowest_bound_left_s == 2.0


def test_a_limit_is_told_not_hidden() -> None:
    bounds = np.full(50, 1.0)
    outcome = best_first(bounds, lambda index: forecast(2.0 + index), Limits(keep=3, proof=10))
    assert outcome.priced == 10
    assert outcome.left == 40
    assert not outcome.proven


def test_the_table_has_its_own_limit_once_the_best_is_proven() -> None:
    bounds = np.array([1.0, *np.linspace(2.0, 3.0, 49)])
    outcome = best_first(bounds, lambda index: forecast([1.5, *[9.0] * 49][index]), Limits(keep=3, table=5))
    assert outcome.priced == 5
    assert outcome.proven


def test_refused_rows_are_kept_with_their_reason() -> None:
    def price(index: int) -> Forecast:
        if index == 0:
            raise BadInput("tensor_parallel_degree = 3: no")
        return forecast(1.0)

    outcome = best_first(np.array([0.1, 0.2]), price)
    assert outcome.refused == [(0, "tensor_parallel_degree = 3: no")]
    assert outcome.priced == 1


def test_nothing_fits() -> None:
    outcome = best_first(np.array([0.1, 0.2]), lambda _: forecast(1.0, fits=False))
    assert outcome.fitting == []
    assert len(outcome.misfits) == 2
    assert outcome.proven
