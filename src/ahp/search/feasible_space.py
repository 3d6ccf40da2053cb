"""The space of a problem, on fewer devices where no layout can use all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ahp.errors import BadInput, NotExpressible
from ahp.search.busy import busy_counts
from ahp.search.choices import DEGREES
from ahp.search.problem import Problem, with_devices
from ahp.search.space import Rule, Space, build
from ahp.words import number_of


@dataclass(frozen=True)
class LegalRows:
    """The table that is searched."""

    problem: Problem
    """As asked, or on fewer devices."""
    space: Space
    notes: tuple[str, ...] = ()
    """That devices are left over, and why."""


def legal_rows(asked: Problem) -> LegalRows:
    """The space of a problem with at least one legal row.

    Raises BadInput when there is none: with fixed degrees for all devices, else for any number of devices.
    NotExpressible when it is the engine that can run none.
    """
    total = asked.cluster.num_devices
    space = build(asked)
    if len(space.blocks):
        return LegalRows(asked, space)
    rule = _binding(space, asked.constraints.given)
    fewer = next(_on_fewer(asked), None)
    refusal = f"parallelism: no legal layout of {number_of(total, 'device')}: {rule.says}"
    if fewer is None:
        raise (NotExpressible if rule.name.startswith("engine") else BadInput)(refusal)
    count = fewer.problem.cluster.num_devices
    if any(key in asked.constraints.given for key in DEGREES):
        raise BadInput(f"{refusal}; {number_of(count, 'device')} would do")
    note = f"{count} of {total} devices are used: with all of them no layout is legal ({rule.says})"
    return LegalRows(fewer.problem, fewer.space, (note,))


def _on_fewer(asked: Problem) -> Iterator[LegalRows]:
    """The space on fewer devices, the most first: whole nodes, then a part of one."""
    if asked.cluster.is_mixed:
        return
    for count in busy_counts(asked):
        if count == asked.cluster.num_devices:
            continue
        used = asked.on(with_devices(asked.cluster, count))
        try:
            space = build(used)
        except BadInput:
            continue
        if len(space.blocks):
            yield LegalRows(used, space)


def _binding(space: Space, given: Collection[str]) -> Rule:
    """Where all rows break a rule: one that all of them break, else one about a key that was given, of these the one that the most do."""

    def weight(rule: Rule) -> tuple[bool, bool, int]:
        return rule.broken >= space.size, rule.says.split(" = ")[0] in given, rule.broken

    return max(space.rules, key=weight)
