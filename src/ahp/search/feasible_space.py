"""The space of a problem, on fewer devices if no layout can use all devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ahp.errors import BadInput, NotExpressible
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.busy import busy_counts
from ahp.search.choices import DEGREES
from ahp.search.problem import Problem, with_devices
from ahp.search.space import Rule, Space, build
from ahp.words import number_of

LOOKED_AT = 3
"""How many numbers of devices are compared, the largest that have a legal layout. The one with the lowest bound of a step is used: five devices
that share each product may be slower than four that do not."""


@dataclass(frozen=True)
class LegalRows:
    """The table that is searched."""

    problem: Problem
    """The problem as asked, or on fewer devices."""
    space: Space
    notes: tuple[str, ...] = ()
    """A note that devices are left over, and why."""


def legal_rows(asked: Problem) -> LegalRows:
    """The space of a problem with at least one legal row.

    Raises BadInput if there is none: on all devices if degrees are fixed, else on any number of devices; on any number too for a group
    of a mixed cluster. NotExpressible if it is the engine that cannot run any.
    """
    total = asked.cluster.num_devices
    try:
        space = build(asked)
    except BadInput as refused:  # no product of degrees is the number of devices
        if not asked.is_group_alone or (fewer := _best_on_fewer(asked)) is None:
            raise
        return LegalRows(fewer.problem, fewer.space, (_note(asked, fewer, str(refused)),))
    if len(space.blocks):
        return LegalRows(asked, space)
    rule, fewer = _binding(space, asked.constraints.given), _best_on_fewer(asked)
    refusal = f"parallelism: no legal layout of {number_of(total, 'device')}: {rule.says}"
    if fewer is None:
        raise (NotExpressible if rule.name.startswith("engine") else BadInput)(refusal)
    if not asked.is_group_alone and any(key in asked.constraints.given for key in DEGREES):
        raise BadInput(f"{refusal}; {number_of(fewer.problem.cluster.num_devices, 'device')} would do")
    return LegalRows(fewer.problem, fewer.space, (_note(asked, fewer, rule.says),))


def _note(asked: Problem, fewer: LegalRows, reason: str) -> str:
    """Which devices are used, and why not all."""
    count, total = fewer.problem.cluster.num_devices, asked.cluster.num_devices
    group, of = fewer.problem.cluster.groups[0], asked.cluster.groups[0]
    each = (
        f", {group.devices_per_node} of each of {group.nodes} nodes,"
        if group.nodes > 1 and group.devices_per_node < of.devices_per_node
        else ""
    )
    return f"{count} of {total} devices{each} are used: no layout of all devices is legal ({reason})"


def _best_on_fewer(asked: Problem) -> LegalRows | None:
    return min(islice(_on_fewer(asked), LOOKED_AT), key=_least_s, default=None)


def _least_s(rows: LegalRows) -> float:
    """A lower bound of every layout's step in seconds; infinite if none fits."""
    return float(Bounds(rows.problem, rows.space).first_s().min(initial=np.inf))


def _on_fewer(asked: Problem) -> Iterator[LegalRows]:
    """The spaces on fewer devices, the most first: equally many on each of some nodes."""
    if asked.cluster.is_mixed:
        return
    for count in busy_counts(asked):
        part = with_devices(asked.cluster, count)
        if part is None or count == asked.cluster.num_devices:
            continue
        used = asked.on(part)
        try:
            space = build(used)
        except BadInput:
            continue
        if len(space.blocks):
            yield LegalRows(used, space)


def _binding(space: Space, given: Collection[str]) -> Rule:
    """The rule to name if every row breaks one: a rule that all rows break, else one about a given key, else that the batch does not
    divide, which anyone can change; among several, the one that most rows break."""

    def weight(rule: Rule) -> tuple[bool, bool, bool, int]:
        about_given = rule.says.split(" = ")[0] in given
        return rule.broken >= space.size, about_given, rule.name == "batch", rule.broken

    return max(space.rules, key=weight)
