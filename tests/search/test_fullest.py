"""The least that the fullest rank holds, against the best division that a linear program finds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from ahp.arrays import Floats, Ints
from ahp.search.bounds.block_bounds import fullest_of_any_cut


def least_of_any_division(each: Floats, counts: Ints) -> float:
    """``each``: [p, K] bytes that a layer of each kind takes on each rank; layers can be divided among ranks."""
    p, kinds = each.shape
    cost = np.zeros(p * kinds + 1)
    cost[-1] = 1.0
    ranks = np.hstack([np.kron(np.eye(p), np.ones(kinds)) * each.reshape(-1), -np.ones((p, 1))])
    all_layers = np.hstack([np.tile(np.eye(kinds), p), np.zeros((kinds, 1))])
    found = linprog(cost, A_ub=ranks, b_ub=np.zeros(p), A_eq=all_layers, b_eq=counts)
    return float(found.fun)


@pytest.mark.parametrize("seed", range(40))
def test_no_division_holds_less(seed: int) -> None:
    draw = np.random.default_rng(seed)
    p, kinds = int(draw.integers(1, 6)), int(draw.integers(1, 4))
    counts, states = draw.integers(1, 30, kinds), draw.uniform(1.0, 40.0, kinds)
    each = states + draw.uniform(0.0, 5.0) * draw.integers(1, p + 1, (p, 1))
    least = least_of_any_division(each, counts)
    found = float(fullest_of_any_cut(each, counts))
    assert found <= least * (1 + 1e-7)
    assert found >= 0.9 * least


@pytest.mark.parametrize("seed", range(10))
def test_where_kinds_weigh_alike_on_all_ranks_it_is_the_least(seed: int) -> None:
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 30, 3)
    each = np.outer(draw.uniform(1.0, 9.0, 4), draw.uniform(1.0, 40.0, 3))
    assert float(fullest_of_any_cut(each, counts)) == pytest.approx(least_of_any_division(each, counts), rel=1e-7)


def test_few_light_layers_do_not_make_all_light() -> None:
    """Three layers without experts among 61: all count with what they hold."""
    each, counts = np.array([[1.0, 30.0]] * 4), np.array([3, 58])
    assert float(fullest_of_any_cut(each, counts)) == pytest.approx((3 + 30 * 58) / 4)
