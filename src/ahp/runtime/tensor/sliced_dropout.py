"""Dropout of a tensor that the ranks hold parts of: each rank drops its own elements by its own random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ahp.runtime.compute.uncompiled import uncompiled
from ahp.search.slicing.placement import args_of, kwargs_of
from ahp.search.slicing.solve import Slicing


def with_own_numbers(operator: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """The operator with random numbers of this rank only; the shared generator advances equally on all ranks.

    Ranks of a tensor-parallel group start from one seed, so that all drop the same elements of whole tensors. If they used
    the same numbers for parts too, every rank would drop the same places of its heads (Megatron-LM keeps a generator for
    each rank for this, arXiv 1909.08053, section 3).

    It stays outside of compiled graphs: torch.compile would read the seed as a constant, and compile again for each seed.
    """

    @uncompiled
    def run(*args: Any, **kwargs: Any) -> Any:
        seed = int(torch.randint(2**62, ()).item()) + rank
        devices = {arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(seed)
            return operator(*args, **kwargs)

    run.__name__ = "with_own_numbers"
    return run


def drops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers: dropout in training, or attention with a dropout probability."""
    if operator is torch.ops.aten.dropout.default:
        return bool(args[1]) and bool(args[2])
    if operator is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    return False


def drops_parts(found: Slicing) -> bool:
    """Whether a sliced block drops elements of a tensor that the ranks have parts of."""
    chosen = found.chosen.items()
    return any(strategy.divides and drops(node.target, args_of(node), kwargs_of(node)) for node, strategy in chosen)
