"""Activations that are computed again in backward instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Context = Callable[[], AbstractContextManager[Any]]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Around the first run and around the second."""

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What selective recompute does not run again: products with a weight, and fused attention. Batched products are those of
unfused attention, whose scores are the largest activation of all."""


def recompute(block: nn.Module, kind: Literal["selective", "full"], around: Context = nullcontext) -> None:
    """Keep of a block's forward nothing but its inputs, and if ``selective`` the products, in place; backward runs the rest
    again, within ``around``.

    Its forward alone is wrapped: parameter names stay, and hooks on the block (FSDP2's) run once, outside.
    """
    forward = block.forward

    def contexts() -> Contexts:
        if kind == "full":
            return nullcontext(), around()
        keep, again = keep_products()
        return keep, _both(again, around())

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = run  # type: ignore[method-assign]


def keep_products() -> Contexts:
    """What ``checkpoint`` takes as ``context_fn`` to keep products with a weight and fused attention."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # A random operator that is left out would shift the numbers of the next one, so their results are kept too; those that
    # write in place cannot be.
    random = torch.Tag.nondeterministic_seeded in operator.tags and not operator._schema.is_mutable
    return CheckpointPolicy.MUST_SAVE if operator in KEPT or random else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield
