"""Simulated annealing over the layouts: scipy's generalized one (arXiv cond-mat/9501016), within a budget of forecasts."""

from __future__ import annotations

from contextlib import suppress

from ahp.search.encoding import NUM_GENES, BudgetSpent, Objective


def anneal(objective: Objective, seed: int) -> None:
    """Price layouts until the budget is spent or ten times as many points were tried; the same seed gives the same walk."""
    from scipy.optimize import dual_annealing

    with suppress(BudgetSpent):
        dual_annealing(
            objective,
            [(0.0, 1.0)] * NUM_GENES,
            maxiter=objective.budget,
            maxfun=10 * objective.budget,
            no_local_search=True,  # it follows gradients, and here there are none
            rng=seed,
        )
