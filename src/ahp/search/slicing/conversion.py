"""Conversions from one placement to another: their collectives, forward and backward, and what a rank sends in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from ahp.search.slicing.placement import C, Context, Partial, Placement, R, Replicated, Split, shape_of

Kind = Literal["sum", "sum_gradient", "gather", "gather_and_sum_gradient", "sum_and_cut", "cut"]

PRODUCTS = {torch.ops.aten.linear.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default}

PASSES: dict[Kind, tuple[int, int]] = {
    "sum": (2, 0),  # all-reduce; every rank holds the whole gradient already
    "sum_gradient": (0, 2),  # nothing; all-reduce
    "gather": (1, 0),  # all-gather; each rank takes its part of a gradient that is whole on every rank
    "gather_and_sum_gradient": (1, 1),  # all-gather; reduce-scatter
    "sum_and_cut": (1, 1),  # reduce-scatter; all-gather
    "cut": (0, 1),  # each rank takes its part; all-gather
}
"""Passes over the whole tensor around a ring of the ranks, forward and backward."""


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, and the split that it starts from or ends in."""

    kind: Kind
    split: Split | None = None


@dataclass(frozen=True)
class Permission:
    """Which conversions a slicing may use besides sums over ranks."""

    gathers_weights: bool = False
    """The result of a column-split weight may be made whole again, and a whole tensor may be cut for a row split."""
    gathers_tokens: bool = False
    """Parts of the tokens may be made whole, and whole tensors and sums may be cut into such parts."""


def steps(have: Placement, wanted: Placement, *, needs_sum: bool) -> tuple[Step, ...] | None:
    """The steps that bring a tensor from ``have`` to ``wanted``; None where there is no way.

    ``needs_sum``: the tensor is whole and is read by work that the ranks share, so their gradients have to be added up.
    """
    gradient = (Step("sum_gradient"),) if needs_sum else ()
    if C in (have, wanted):
        if have != C:
            return steps(have, R, needs_sum=True)
        return () if wanted == C or (wanted == R and needs_sum) else None
    if have == wanted:
        return gradient
    if isinstance(have, Partial):
        if isinstance(wanted, Replicated):
            return (Step("sum"), *gradient)
        return (Step("sum_and_cut", wanted),) if isinstance(wanted, Split) else None
    if isinstance(have, Split):
        if isinstance(wanted, Replicated):
            return (Step("gather_and_sum_gradient" if needs_sum else "gather", have),)
        # between columns and tokens: the effect of an all-to-all, by the collectives that exist already
        if isinstance(wanted, Split) and wanted.tokens != have.tokens:
            return (Step("gather", have), Step("cut", wanted))
        return None
    return (Step("cut", wanted),) if isinstance(wanted, Split) else None


def allowed(step: Step, source: Node, permission: Permission, context: Context) -> bool:
    """Whether a slicing with this permission may take the step."""
    split = step.split
    if split is None:
        return True
    if not split.tokens:
        for_rows = step.kind == "cut" and any(user.target in PRODUCTS for user in source.users)
        return permission.gathers_weights and (for_rows or step.kind in ("gather", "gather_and_sum_gradient"))
    if step.kind in ("gather", "gather_and_sum_gradient", "sum_and_cut"):
        return permission.gathers_tokens
    shape = shape_of(source)
    return permission.gathers_tokens and context.tokens is not None and context.tokens.may_start(split, shape)


def ring_bytes(node: Node, degree: int) -> int:
    """Bytes that a rank sends in one pass around the ring over a node's global tensor."""
    value = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum(v.numel() * v.element_size() for v in values) * (degree - 1) // degree


def bytes_of(step: Step, source: Node, degree: int, *, has_gradient: bool) -> int:
    """Bytes that a rank sends for a step, forward and backward."""
    forward, backward = PASSES[step.kind]
    return (forward + (backward if has_gradient else 0)) * ring_bytes(source, degree)
