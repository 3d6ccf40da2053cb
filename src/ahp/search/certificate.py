"""What a search looked at, and why nothing better was missed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ahp.search.exact import Outcome
from ahp.search.space import Rule, Space
from ahp.words import seconds

SOLVERS = {"anneal": "simulated annealing", "evolve": "differential evolution"}


@dataclass(frozen=True)
class Certificate:
    """What was looked at, and why nothing better was missed. Rows: every combination whose degrees multiply up."""

    rows: int
    rules: tuple[Rule, ...]
    broken: int
    """Rows that break a rule, one at least."""
    alike: int
    """Rows that break none, but whose ZeRO stage the engine runs as a lower one, which has a row."""
    not_fit: int
    """Legal rows that do not fit: by their forecast, or already by a lower bound of their memory."""
    fit: int
    """Rows priced that fit."""
    left: int
    """Legal rows not priced, because their lower bound is above the times found."""
    forecasts: int
    cuts: int
    """Forecasts beside these, of the fastest pipelines with their stages cut otherwise than as even as can be."""
    lightened: int
    """Forecasts beside these, of the fastest that recompute with fewer layers recomputed."""
    best_s: float
    """Of the rows, whose stages are as even as can be."""
    lowest_bound_left_s: float | None
    """No row left can take less than this."""
    proven: bool
    """Whether no other row can be faster than the best, by this forecast."""
    any_cut_s: float | None
    """No layout with a pipeline that recomputes all layers or none can take less than this, however they are cut; None where the
    cut is fixed."""
    any_part_s: float | None
    """No layout that recomputes a part of its layers can take less than this, however they are cut; None where what is recomputed
    is fixed, or the engine has all or nothing."""
    found_s: float
    """Of the best found, also among other cuts and with fewer layers recomputed."""
    search_s: float
    solver: str = "exact"
    """What chose the layouts that were priced: exact, anneal or evolve."""
    kernels: bool = False
    """Whether rows are layouts with compiled blocks and layouts with eager ones."""

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return asdict(self)

    def words(self) -> str:
        """One line for people."""
        if self.solver != "exact":
            return self._of_solver()
        found = (
            f"Searched {self.rows:,} layouts{self._kernels()} in {self.search_s:.1f} s: {self.broken:,} break a rule, "
            f"{self._alike()}{self.not_fit:,} do not fit, {self.fit:,} forecast and fit, {self.left:,} left"
        )
        if self.cuts:
            found += f" ({self.cuts} other cuts into stages of the fastest)"
        if self.lightened:
            found += f" ({self.lightened} with fewer layers recomputed)"
        if self.lowest_bound_left_s is None:
            return found
        bound = seconds(self.lowest_bound_left_s)
        if self.proven:
            return f"{found} that cannot be faster (none under {bound}{self._of_others()})"
        return f"{found} not forecast: the best is not proven, a layout of {bound} may be among them"

    def _of_solver(self) -> str:
        """Of a solver with a budget: what it evaluated, and what that proves."""
        legal = self.rows - self.broken - self.alike
        found = f"Evaluated {self.forecasts:,} of {legal:,} legal layouts by {SOLVERS[self.solver]} in {self.search_s:.1f} s"
        if self.proven:
            return f"{found}: no other is faster"
        bound = seconds(self.lowest_bound_left_s or 0.0)
        return (
            f"{found}: the best is not proven, a layout of {bound} may be among the others. The exact search proves "
            "its best, in seconds on 16,384 devices too"
        )

    def beside(self, other: Certificate) -> Certificate:
        """Of this search together with one of the same layouts with other kernels, whose best is no better."""
        summed = ("rows", "broken", "alike", "not_fit", "fit", "left", "forecasts", "cuts", "lightened", "search_s")
        lowest_s = _lowest(self.lowest_bound_left_s, other.lowest_bound_left_s)
        kept = other.lowest_bound_left_s is None or other.lowest_bound_left_s >= self.found_s
        return replace(
            self,
            **{key: getattr(self, key) + getattr(other, key) for key in summed},
            rules=merged([self.rules, other.rules]),
            lowest_bound_left_s=lowest_s,
            proven=self.proven and kept,
            any_cut_s=_lowest(self.any_cut_s, other.any_cut_s),
            any_part_s=_lowest(self.any_part_s, other.any_part_s),
            kernels=True,
        )

    def _kernels(self) -> str:
        return ", compiled and eager," if self.kernels else ""

    def _alike(self) -> str:
        return f"{self.alike:,} run the same as another, " if self.alike else ""

    def _of_others(self) -> str:
        """What is known of the cuts into stages, and of the layers to recompute, that were not tried."""
        settled, left = "", ""
        floors = (
            (self.any_cut_s, "however uneven the stages", "uneven stages"),
            (self.any_part_s, "whichever layers are recomputed", "other layers recomputed"),
        )
        for floor_s, whatever, others in floors:
            if floor_s is not None and floor_s >= self.found_s:
                settled += f", {whatever}"
            elif floor_s is not None:
                left += f"; with {others} none under {seconds(floor_s)}"
        return settled + left


def certified(
    space: Space,
    found: Outcome,
    tried: tuple[int, int],
    found_s: float,
    floors_s: tuple[float | None, float | None],
    search_s: float,
    solver: str = "exact",
) -> Certificate:
    """``tried``: forecasts of other cuts, and with fewer layers recomputed; ``floors_s``: under all of either."""
    return Certificate(
        rows=space.size,
        rules=space.rules,
        broken=space.size - space.num_legal - space.num_alike + len(found.refused),
        alike=space.num_alike,
        not_fit=found.too_large + len(found.misfits),
        fit=len(found.fitting),
        left=found.left,
        forecasts=found.priced,
        cuts=tried[0],
        lightened=tried[1],
        best_s=found.fitting[0][1].step_time_s if found.fitting else float("inf"),
        lowest_bound_left_s=found.lowest_bound_left_s,
        proven=found.proven,
        any_cut_s=floors_s[0],
        any_part_s=floors_s[1],
        found_s=found_s,
        search_s=search_s,
        solver=solver,
    )


def _lowest(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)


def merged(found: list[tuple[Rule, ...]]) -> tuple[Rule, ...]:
    """The rules of several spaces, each with the rows that break it in all of them."""
    rules: dict[str, Rule] = {}
    for rule in (rule for several in found for rule in several):
        before = rules.get(rule.name, replace(rule, broken=0))
        rules[rule.name] = replace(before, broken=before.broken + rule.broken)
    return tuple(rules.values())
