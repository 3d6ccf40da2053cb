"""Differential evolution over the layouts: scipy's (Storn and Price, 1997), within a budget of forecasts."""

from __future__ import annotations

from contextlib import suppress

from ahp.search.encoding import NUM_GENES, BudgetSpent, Objective

POPULATION = 4
"""Points for each coordinate; scipy's 15 would spend a small budget on the first generation."""


def evolve(objective: Objective, seed: int) -> None:
    """Price layouts until the budget is spent or the population has converged; the same seed gives the same course."""
    from scipy.optimize import differential_evolution

    with suppress(BudgetSpent):
        differential_evolution(
            objective,
            [(0.0, 1.0)] * NUM_GENES,
            maxiter=10 * objective.budget // (POPULATION * NUM_GENES) + 1,
            popsize=POPULATION,
            polish=False,  # it follows gradients, and here there are none
            rng=seed,
        )
