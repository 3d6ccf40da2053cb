"""The verb ``ahp.search``: plans best first, the certificate, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan, Rejected
from ahp.search import telling
from ahp.search.bounds import Bounds
from ahp.search.exact import Limits, Outcome, best_first
from ahp.search.misfit import nothing_fits
from ahp.search.problem import problem
from ahp.search.rows import LegalRows, legal_rows
from ahp.search.space import Mask, Rule
from ahp.words import seconds

NEAR = 2.0
"""A layout that needs more than this many times the device's memory is not told of as a near miss."""


@dataclass(frozen=True)
class Certificate:
    """What was looked at, and why nothing better was missed. Rows: every combination whose degrees multiply up."""

    rows: int
    rules: tuple[Rule, ...]
    broken: int
    """Rows that break a rule, one at least."""
    not_fit: int
    """Legal rows that do not fit: by their forecast, or already by a lower bound of their memory."""
    fit: int
    """Rows priced that fit."""
    left: int
    """Legal rows not priced, because their lower bound is above the times found."""
    forecasts: int
    best_s: float
    lowest_bound_left_s: float | None
    """No row left can take less than this."""
    proven: bool
    """Whether no other row can be faster than the best, by this forecast."""
    search_s: float

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return asdict(self)

    def words(self) -> str:
        """One line for people."""
        found = (
            f"Searched {self.rows:,} layouts in {self.search_s:.1f} s: {self.broken:,} break a rule, "
            f"{self.not_fit:,} do not fit, {self.fit:,} priced and fit, {self.left:,} left"
        )
        if self.lowest_bound_left_s is None:
            return found
        bound = seconds(self.lowest_bound_left_s)
        if self.proven:
            return f"{found} that cannot win (none under {bound})"
        return f"{found} unpriced: the best is not proven, a layout of {bound} may be among them"


@dataclass(frozen=True)
class Ranking:
    """Plans best first, with what the search can say about them."""

    plans: tuple[Plan, ...]
    certificate: Certificate
    too_large: tuple[Rejected, ...]
    """Layouts that would be faster but do not fit."""
    losers: tuple[Rejected, ...]
    """Every layout that was priced and is not in ``plans``, each with its one reason; those too large first."""
    notes: tuple[str, ...] = ()
    """What the user should know beside: devices that are left over."""

    @property
    def best(self) -> Plan:
        return self.plans[0]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)


def search(
    graph: ModelGraph,
    cluster: Cluster | Mapping[str, Any] | str,
    job: Job | Mapping[str, Any],
    *,
    constraints: Constraints | Parallelism | Mapping[str, Any] | None = None,
    engine: EngineChoice | Mapping[str, Any] | None = None,
    keep: int = 10,
) -> Ranking:
    """Rank every legal layout that fits by its forecast step time.

    Args:
        graph: from ``ahp.analyze`` with the same job.
        cluster: a Cluster, its plain form, a path, or a short form such as ``8x8xH100-SXM-80GB``.
        job: what must not change.
        constraints: the keys of the layout that are fixed; the others are searched.
        engine: what will run the plan.
        keep: plans of the ranking, one at least.

    Returns:
        At most ``keep`` plans, fastest first. Devices are left over only where no layout can use all of them and
        the user has fixed no degree; ``notes`` and the plans' ``why`` then say so.

    Raises:
        BadInput: arguments or constraints that contradict each other, the model or the cluster.
        NotExpressible: the engine cannot run what is fixed, or is not there yet.
        NothingFits: legal layouts there are, but none fits; with the nearest miss and checked remedies.
    """
    start = perf_counter()
    keep = max(keep, 1)
    table = legal_rows(problem(graph, cluster, job, constraints, engine))
    used, space, mask = table.problem, table.space, table.mask
    bounds = Bounds(used)
    needs = bounds.memory_bytes(space, mask)
    roomy = mask & (needs <= bounds.most_that_fits_bytes())
    near = mask & (needs <= NEAR * used.capacity_bytes)
    times = bounds.time_s(space, roomy | near)
    rows = np.flatnonzero(roomy)
    found = best_first(times[rows], lambda i: used.price(space.row(int(rows[i]))), Limits(keep=keep))
    if not found.fitting:
        raise nothing_fits(used)
    certificate = _certificate(table, roomy, found, perf_counter() - start)
    ranked = [(space.row(int(rows[i])), forecast) for i, forecast in found.fitting]
    best_row, best = int(rows[found.fitting[0][0]]), ranked[0][1]
    misfits = [(space.row(int(rows[i])), forecast) for i, forecast in found.misfits]
    tight = telling.misfits_to_price(space, near & ~roomy, times, needs, best_row, best.step_time_s)
    misfits += telling.priced(used, space, tight)
    large = telling.too_large(misfits, best, used.capacity_bytes)
    lost = tuple(telling.runner_up(pair, best) for pair in ranked[1:])
    at_least_s = telling.floors(space, roomy, times, best_row)
    why = (*telling.why(used, ranked, misfits, certificate.words(), at_least_s), *table.notes)
    plans = [telling.plan(used, ranked[0], why, (*lost[: keep - 1], *large))]
    plans += [
        telling.plan(used, pair, (loser.reason,)) for pair, loser in zip(ranked[1:keep], lost[: keep - 1], strict=True)
    ]
    return Ranking(tuple(plans), certificate, large, (*large, *lost[keep - 1 :]), table.notes)


def _certificate(table: LegalRows, roomy: Mask, found: Outcome, search_s: float) -> Certificate:
    return Certificate(
        rows=len(table.space),
        rules=table.rules,
        broken=int((~table.mask).sum()) + len(found.refused),
        not_fit=int(table.mask.sum() - roomy.sum()) + len(found.misfits),
        fit=len(found.fitting),
        left=found.left,
        forecasts=found.priced,
        best_s=found.fitting[0][1].step_time_s,
        lowest_bound_left_s=found.lowest_bound_left_s,
        proven=found.proven,
        search_s=search_s,
    )
