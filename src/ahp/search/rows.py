"""The legal rows of a problem, on fewer devices where no layout can use all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ahp.errors import BadInput
from ahp.search.problem import Problem, with_devices
from ahp.search.space import DEGREES, Mask, Rule, Space, build, divisors, legal


@dataclass(frozen=True)
class LegalRows:
    """The table that is searched."""

    problem: Problem
    """As asked, or on fewer devices."""
    space: Space
    mask: Mask
    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()
    """That devices are left over, and why."""


def legal_rows(asked: Problem) -> LegalRows:
    """The table of a problem with at least one legal row.

    Raises BadInput when there is none: with fixed degrees for all devices, else for any number of devices.
    """
    space = build(asked.shape, asked.constraints)
    mask, rules = legal(space, asked.tensor_reason)
    if mask.any():
        return LegalRows(asked, space, mask, rules)
    total = asked.cluster.num_devices
    reason = _binding(rules)
    fewer = next(_on_fewer(asked), None)
    refusal = f"parallelism: no legal layout of {total} devices: {reason}"
    if fewer is None:
        raise BadInput(refusal)
    count = fewer.problem.cluster.num_devices
    if any(key in asked.constraints.given for key in DEGREES):
        raise BadInput(f"{refusal}; {count} devices would do")
    note = f"{count} of {total} devices are used: with all of them no layout is legal ({reason})"
    return LegalRows(fewer.problem, fewer.space, fewer.mask, fewer.rules, (note,))


def _on_fewer(asked: Problem) -> Iterator[LegalRows]:
    """The table on fewer devices, the most first: whole nodes, then a part of one."""
    if asked.cluster.is_mixed:
        return
    group = asked.cluster.groups[0]
    counts = [nodes * group.devices_per_node for nodes in range(group.nodes - 1, 0, -1)]
    for count in [*counts, *range(group.devices_per_node - 1, 0, -1)]:
        if not _possible(asked, count):
            continue
        used = asked.on(with_devices(asked.cluster, count))
        try:
            space = build(used.shape, used.constraints)
        except BadInput:
            continue
        mask, rules = legal(space, used.tensor_reason)
        if mask.any():
            yield LegalRows(used, space, mask, rules)


def _possible(asked: Problem, count: int) -> bool:
    """Whether the degrees alone can multiply to ``count``; much cheaper than the table."""
    batch, layers = asked.job.global_batch_size, max(asked.graph.num_layers, 1)
    for pipeline in (d for d in divisors(count) if d <= layers):
        replicas_and_tensor = count // pipeline
        for replicas in (d for d in divisors(replicas_and_tensor) if batch % d == 0):
            if asked.tensor_reason(replicas_and_tensor // replicas) is None:
                return True
    return False


def _binding(rules: tuple[Rule, ...]) -> str:
    """The rule that the most rows break, where all rows break one."""
    return max(rules, key=lambda rule: rule.broken).says
