"""The space of a problem, on fewer devices if no layout can use all devices; and how many devices a model and a batch can keep busy."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ahp.divisors import divisors
from ahp.errors import BadInput, NotExpressible, bad_input
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.choices import DEGREES
from ahp.search.problem import Problem, with_devices
from ahp.search.space import Rule, Space, build
from ahp.words import number_of

LOOKED_AT = 3
"""How many numbers of devices are compared, the largest that have a legal layout. The one with the lowest bound of a step is used: five devices
that share each product may be slower than four that do not."""

MOST_TENSOR = 1024
"""More than the attention heads of any model."""

MOST_DEVICES = 131_072
"""The most devices that are searched: 16,384 took a minute of one processor for both kinds of blocks, and the largest clusters that
train one model are of this size. A million was not done after minutes."""


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


def refuse_too_many(asked: Problem) -> None:
    """Raise BadInput for a cluster of more devices than are searched, with the most that the job could keep busy."""
    total = asked.cluster.num_devices
    if total <= MOST_DEVICES:
        return
    rule = f"{MOST_DEVICES:,} are searched at most"
    if not asked.cluster.is_mixed and (counts := busy_counts(asked)):
        batch, length = asked.job.global_batch_size, asked.job.sequence_length
        rule += f"; {batch} sequences of {length} tokens keep no more than {counts[0]:,} devices busy"
    raise bad_input("cluster", f"{total:,} devices", rule, [f"up to {MOST_DEVICES:,}, or ahp simulate one layout"])


def busy_counts(asked: Problem) -> list[int]:
    """Every number of devices, up to the cluster's, that can be kept busy, the largest first: equally many on each of some nodes.

    The replicas divide the batch; one replica has as many devices as heads, layers and tokens can keep busy.
    """
    total = asked.cluster.num_devices
    pipelines, data = range(1, max(asked.most_stages, 1) + 1), divisors(asked.job.global_batch_size)
    tensors = [tensor for tensor in range(1, MOST_TENSOR + 1) if asked.can_divide(tensor, 1)]
    contexts = divisors(asked.job.sequence_length)
    cells = {tensor * context for tensor in tensors for context in contexts if asked.can_divide(tensor, context)}
    replicas = {cell * pipeline for cell in cells for pipeline in pipelines if cell * pipeline <= total}
    found = {count for one in replicas for d in data if (count := one * d) <= total}
    return sorted((n for n in found if with_devices(asked.cluster, n) is not None), reverse=True)
