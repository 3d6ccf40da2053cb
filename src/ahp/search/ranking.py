"""The verb ``ahp.search``: plans best first, the certificate, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import numpy as np

from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.errors import BadInput
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism, Plan, Rejected
from ahp.search import reasons
from ahp.search.bounds import Bounds
from ahp.search.exact import Limits, Outcome, best_first
from ahp.search.misfit import nothing_fits
from ahp.search.problem import Problem, problem, with_devices
from ahp.search.space import DEGREES, Mask, Rule, Space, build, legal
from ahp.words import of_gib, percent, seconds

NUM_MISFITS_TOLD = 3
"""Layouts that would be faster but do not fit, told beside the runners-up."""


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
        NothingFits: legal layouts there are, but none fits; with the nearest miss and checked remedies.
    """
    start = perf_counter()
    asked = problem(graph, cluster, job, constraints, engine)
    used, space, mask, rules, notes = _legal_rows(asked)
    bounds = Bounds(used)
    times = bounds.time_s(space, mask)
    roomy = mask & (bounds.memory_bytes(space, mask) <= used.capacity_bytes)
    rows = np.flatnonzero(roomy)
    outcome = best_first(times[rows], lambda i: used.price(space.row(int(rows[i]))), Limits(keep=max(keep, 1)))
    outcome = replace_indices(outcome, rows)
    if not outcome.fitting:
        raise nothing_fits(used)
    certificate = Certificate(
        rows=len(space),
        rules=rules,
        broken=int((~mask).sum()) + len(outcome.refused),
        not_fit=int(mask.sum() - roomy.sum()) + len(outcome.misfits),
        fit=len(outcome.fitting),
        left=outcome.left,
        forecasts=outcome.priced,
        best_s=outcome.fitting[0][1].step_time_s,
        lowest_bound_left_s=outcome.lowest_bound_left_s,
        proven=outcome.proven,
        search_s=perf_counter() - start,
    )
    tight = [int(row) for row in np.flatnonzero(mask & ~roomy)]
    tight = sorted(tight, key=lambda row: times[row])[:NUM_MISFITS_TOLD]
    return _ranking(used, space, outcome, certificate, notes, tight, max(keep, 1))


def replace_indices(outcome: Outcome, rows: np.ndarray) -> Outcome:
    """The outcome with the indices of the whole table instead of those of its selected rows."""
    return replace(
        outcome,
        fitting=[(int(rows[i]), forecast) for i, forecast in outcome.fitting],
        misfits=[(int(rows[i]), forecast) for i, forecast in outcome.misfits],
        refused=[(int(rows[i]), reason) for i, reason in outcome.refused],
    )


def _legal_rows(asked: Problem) -> tuple[Problem, Space, Mask, tuple[Rule, ...], tuple[str, ...]]:
    """The table with its legal rows, on fewer devices where no layout can use all of them."""
    space = build(asked.shape, asked.constraints)
    mask, rules = legal(space, asked.tensor_reason)
    if mask.any():
        return asked, space, mask, rules, ()
    reason = _binding(space, mask, rules)
    total = asked.cluster.num_devices
    fixed = [key for key in DEGREES if key in asked.constraints.given]
    for count in range(total - 1, 0, -1):
        smaller = with_devices(asked.cluster, count)
        if smaller.num_devices != count or asked.cluster.is_mixed:
            continue
        used = asked.on(smaller)
        try:
            space = build(used.shape, used.constraints)
        except BadInput:
            continue
        mask, rules = legal(space, used.tensor_reason)
        if not mask.any():
            continue
        if fixed:
            raise BadInput(f"parallelism: no legal layout of {total} devices: {reason}; {count} devices would do")
        note = f"{count} of {total} devices are used: with all of them {reason}"
        return used, space, mask, rules, (note,)
    raise BadInput(f"parallelism: no legal layout of {total} devices: {reason}")


def _binding(space: Space, mask: Mask, rules: tuple[Rule, ...]) -> str:
    """The rule that the most rows break; all rows break one."""
    assert not mask.any()
    return max(rules, key=lambda rule: rule.broken).says


def _ranking(
    used: Problem,
    space: Space,
    outcome: Outcome,
    certificate: Certificate,
    notes: tuple[str, ...],
    tight: list[int],
    keep: int,
) -> Ranking:
    priced = [(space.row(index), forecast) for index, forecast in outcome.fitting]
    best = priced[0][1]
    runners = [
        Rejected(parallelism=layout, reason=reasons.slower_because(forecast, best), step_time_s=forecast.step_time_s)
        for layout, forecast in priced[1:]
    ]
    misfits = [(space.row(index), forecast) for index, forecast in outcome.misfits]
    misfits += [(space.row(index), used.price(space.row(index))) for index in tight]
    faster = sorted((pair for pair in misfits if pair[1].step_time_s < best.step_time_s), key=_time)[:NUM_MISFITS_TOLD]
    unfit = tuple(
        Rejected(
            parallelism=layout,
            reason=reasons.does_not_fit(forecast, used.capacity_bytes),
            step_time_s=forecast.step_time_s,
        )
        for layout, forecast in faster
    )
    why = (*_why(used, priced, misfits, certificate), *notes)
    versions = _versions()
    plans = [
        Plan(
            model=used.graph.model if used.graph.model is not None else used.graph.name,
            job=used.job,
            cluster=used.cluster.plain(),
            engine=used.engine,
            parallelism=layout,
            forecast=forecast,
            why=why if rank == 0 else (runners[rank - 1].reason,),
            rejected=(*runners[: keep - 1], *unfit) if rank == 0 else (),
            versions=versions,
        )
        for rank, (layout, forecast) in enumerate(priced[:keep])
    ]
    return Ranking(tuple(plans), certificate, unfit, (*unfit, *runners[keep - 1 :]), notes)


def _time(pair: tuple[Parallelism, Forecast]) -> float:
    return pair[1].step_time_s


def _why(
    used: Problem,
    priced: list[tuple[Parallelism, Forecast]],
    misfits: list[tuple[Parallelism, Forecast]],
    certificate: Certificate,
) -> Iterator[str]:
    layout, best = priced[0]
    yield (
        f"fastest of the layouts that fit: {seconds(best.step_time_s)} a step "
        f"({seconds(best.step_time_low_s)} .. {seconds(best.step_time_high_s)}), "
        f"{best.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {percent(best.mfu)}"
    )
    yield certificate.words()
    yield (
        f"memory: {of_gib(best.memory_reserved_bytes, used.capacity_bytes)} on the fullest rank, fits with probability {best.fit_probability:.2f}"
    )
    for name, keys in reasons.CHOICES:
        mine = [getattr(layout, key) for key in keys]

        def other(pair: tuple[Parallelism, Forecast], keys: tuple[str, ...] = keys, mine: list[Any] = mine) -> bool:
            return [getattr(pair[0], key) for key in keys] != mine

        words = reasons.choice_words(layout, name)
        rival = next(filter(other, priced), None)
        if rival is not None:
            lost = reasons.slower_because(rival[1], best)
            yield f"{words}: the best with {reasons.choice_words(rival[0], name)} is {lost}"
        faster = min(
            (pair for pair in misfits if other(pair) and _only_differs(pair[0], layout, keys)), key=_time, default=None
        )
        if faster is not None:
            lost = reasons.does_not_fit(faster[1], used.capacity_bytes)
            yield f"{words}: the same with {reasons.choice_words(faster[0], name)} {lost}"


def _only_differs(one: Parallelism, other: Parallelism, keys: tuple[str, ...]) -> bool:
    return all(getattr(one, key) == getattr(other, key) for key in Parallelism.model_fields if key not in keys)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("ahp", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
