"""What a search looked at, and why nothing better was missed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ahp.search.space import Rule
from ahp.words import seconds

SOLVERS = {"anneal": "simulated annealing", "evolve": "differential evolution"}


@dataclass(frozen=True)
class Certificate:
    """What was looked at, and why nothing better was missed. Rows: every combination whose degrees multiply to the devices."""

    rows: int
    rules: tuple[Rule, ...]
    broken: int
    """Rows that break at least one rule."""
    alike: int
    """Rows that break no rule, but whose ZeRO stage the engine runs like a lower one, which has its own row."""
    not_fit: int
    """Legal rows that do not fit: by their forecast, or already by a lower bound of their memory."""
    fit: int
    """Rows priced that fit."""
    left: int
    """Legal rows not priced, because their lower bound is above the times found."""
    forecasts: int
    cuts: int
    """Further forecasts: the fastest pipelines with uneven cuts into stages."""
    lightened: int
    """Further forecasts: the fastest layouts that recompute, with fewer layers recomputed."""
    best_s: float
    """The shortest step of the rows, whose stages are as even as possible."""
    lowest_bound_left_s: float | None
    """No row left can take less than this."""
    proven: bool
    """Whether no other row can be faster than the best, by this forecast."""
    any_cut_s: float | None
    """No layout with a pipeline that recomputes all layers or none can take less than this, whatever its cut into stages; None if
    the cut is fixed, or if no such layout fits."""
    any_part_s: float | None
    """No layout that recomputes a part of its layers can take less than this, whatever its cut into stages; None if what is
    recomputed is fixed, if the engine can only recompute all or nothing, or if no such layout fits."""
    found_s: float
    """The shortest step found, including other cuts and fewer recomputed layers."""
    search_s: float
    solver: str = "exact"
    """How the layouts to price were chosen: exact, anneal or evolve."""
    either_blocks: bool = False
    """Whether each row was considered with compiled blocks and with eager ones."""

    def led_by(self, step_s: float) -> Certificate:
        """The certificate where the first plan takes ``step_s``, with a schedule made for its stages; what is proven stays the same."""
        return self

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return asdict(self)

    def lines(self) -> tuple[str, ...]:
        """For people: what was searched, what was left out and what is proven."""
        left_out = ", ".join(f"{number:,} {words}" for number, words in self._left_out() if number)
        return f"searched: {self._searched()}", f"left out: {left_out or 'none'}", f"proven: {self._proven()}"

    def _searched(self) -> str:
        kernels = ", compiled and eager," if self.either_blocks else ""
        forecasts = self.forecasts + self.cuts + self.lightened
        by = "" if self.solver == "exact" else f" by {SOLVERS[self.solver]}"
        return f"{self.rows:,} layouts{kernels} in {self.search_s:.1f} s; {forecasts:,} forecast in full{by}"

    def _left_out(self) -> list[tuple[int, str]]:
        """Numbers of rows that were not ranked, each with the reason."""
        unseen = "cannot be faster" if self.proven else "not looked at"
        return [
            (self.broken, "not allowed"),
            (self.alike, "same as another"),
            (self.not_fit, "too large"),
            (self.left, unseen),
        ]

    def _proven(self) -> str:
        """What the forecast proves about the layouts that fit, and what it does not prove."""
        bound_s = self.lowest_bound_left_s
        if self.proven or (bound_s is None and self.solver == "exact"):
            rest = "" if bound_s is None else f": the rest takes at least {seconds(bound_s)}"
            return f"nothing faster that fits was missed{rest}{self._other_choices()}"
        may_be = "a faster layout" if bound_s is None else f"a layout of {seconds(bound_s)}"
        more = "" if self.solver == "exact" else "; --method exact proves its best"
        return f"nothing: {may_be} may be among those left out{more}"

    def _other_choices(self) -> str:
        """What is proven about cuts into stages and layers to recompute that were not tried."""
        known = [(floor_s, others) for floor_s, others in self._floors() if floor_s is not None]
        settled = [others for floor_s, others in known if floor_s >= self.found_s]
        bounds = [(f"at least {seconds(floor_s)}" if floor_s else "no bound", floor_s, of) for floor_s, of in known]
        left = [f"{others} ({bound})" for bound, floor_s, others in bounds if floor_s < self.found_s]
        words = f"; no faster with {' or '.join(settled)}" if settled else ""
        return f"{words}; not proven: {', '.join(left)}" if left else words

    def _floors(self) -> list[tuple[float | None, str]]:
        """Other choices than those of the rows, each with its lower bound: 0 where none is known, None where there is no choice."""
        return [(self.any_cut_s, "uneven pipeline stages"), (self.any_part_s, "other layers recomputed")]


def merged(found: list[tuple[Rule, ...]]) -> tuple[Rule, ...]:
    """The rules of several spaces, each with the rows that break it summed over the spaces."""
    rules: dict[str, Rule] = {}
    for rule in (rule for several in found for rule in several):
        before = rules.get(rule.name, replace(rule, broken=0))
        rules[rule.name] = replace(before, broken=before.broken + rule.broken)
    return tuple(rules.values())
