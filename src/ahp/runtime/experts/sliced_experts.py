"""Experts that are divided over ranks, inside of blocks that tensor parallelism slices.

The number of tokens at a rank's experts changes at each call, so their forward cannot be part of a traced graph: it stays
the module's own, on a part of each expert. Every rank of a tensor-parallel group sends its copies to the ranks of its own
expert-parallel group, and gets a summand of the results, which the graph adds up. If the module's own forward would not
give a summand (it adds a bias after its last product), experts stay whole on every rank of the tensor-parallel group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.capture import capture
from ahp.graph.experts import experts as stand_in
from ahp.runtime.compute.uncompiled import uncompiled
from ahp.runtime.tensor.sliced_dropout import drops
from ahp.search.slicing.placement import P, Split, args_of, kwargs_of, tensor_inputs
from ahp.search.slicing.solve import Slicing, solve

TOKENS = 8
"""How many tokens are traced: no result depends on it."""


def splits_of_experts(module: nn.Module, path: str, block: Slicing, width: int, degree: int) -> dict[str, Split]:
    """How each parameter of a module of experts is cut so that its own forward on the parts gives a summand; empty if it would
    not.

    ``module``: at ``path`` in a block, without memory. ``block``: the block's solution. ``width``: of the tokens.
    """
    pinned = {name: block.weights[f"{path}.{name}"] for name, _ in module.named_parameters()}
    dtype = next(module.parameters()).dtype
    tokens = torch.empty(TOKENS, width, dtype=dtype, device="meta", requires_grad=True)
    chosen = torch.zeros(TOKENS, 1, dtype=torch.int64, device="meta")
    weights = torch.empty(TOKENS, 1, dtype=dtype, device="meta", requires_grad=True)
    try:
        captured = capture(module, (tokens, chosen, weights), {})
        found = solve(captured, degree, pinned, permission=block.permission, returns=P)
    except BadInput:
        return {}
    return {n: split for n, split in pinned.items() if isinstance(split, Split)} if _gives_summand(found) else {}


def _gives_summand(found: Slicing) -> bool:
    """Whether all operators run on parts as they are placed: no conversion, no bias after a sum, no dropout of parts."""
    for node, strategy in found.chosen.items():
        placed = [found.placed[source] for source in tensor_inputs(node)]
        dropped = strategy.divides and drops(node.target, args_of(node), kwargs_of(node))
        if placed != list(strategy.inputs) or strategy.adds_bias_after_sum or dropped:
            return False
    return True


class ExpertsPlaceholder:
    """In the graph that the blocks of a kind share, stands for the experts of the block that runs it."""

    def __init__(self) -> None:
        self.module: nn.Module | None = None
        """Set before each run of the graph."""

    @uncompiled
    def __call__(self, *values: torch.Tensor) -> torch.Tensor:
        assert self.module is not None, "no block runs"
        return self.module(*values)  # type: ignore[no-any-return]


def leave_out(block: nn.Module, path: str, *, is_summand: bool) -> None:
    """Make the block, in place, trace its experts at ``path`` as one operator."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        tokens, chosen, weights = (*args, *kwargs.values())
        return stand_in(tokens, chosen, weights, path, is_summand)

    block.get_submodule(path).forward = forward  # type: ignore[method-assign]
