"""Activations that are computed again in backward instead of kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Results = tuple[torch.Tensor, ...]
Value = TypeVar("Value")
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


def recompute(block: nn.Module, kind: Literal["selective", "full"], forward_context: Context = nullcontext) -> None:
    """Keep of a block's forward nothing but its inputs, and if ``selective`` the products, in place; backward runs the rest
    again, within ``forward_context``.

    Its forward alone is wrapped: parameter names stay, and hooks on the block (FSDP2's) run once, outside.
    """
    forward = block.forward

    def contexts() -> Contexts:
        known = _Known()
        first, second = _replacing(_KNOWN, known.learn), _both(_replacing(_KNOWN, known.recall), forward_context())
        if kind == "full":
            return first, second
        (keep, again), kept = keep_products(), _Kept()
        return (
            _both(first, _both(_replacing(_WITHIN, kept.keep), keep)),
            _both(_replacing(_WITHIN, kept.give_back), _both(again, second)),
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = run  # type: ignore[method-assign]


def keep_products() -> Contexts:
    """What ``checkpoint`` takes as ``context_fn`` to keep products with a weight and fused attention."""
    return create_selective_checkpoint_contexts(_policy)


def saved_once(compute: Callable[[], Results]) -> Results:
    """What ``compute`` returns; in the second run of selective recompute what it returned in the first.

    For attention that is no single operator, as around a ring: the results of its parts are not kept.
    """
    how = _WITHIN.get()
    return compute() if how is None else how(compute)


def known_again(compute: Callable[[], Value]) -> Value:
    """What ``compute`` returns; in the second run of a block, whatever the kind of recompute, what it returned in the first.

    For a few numbers that the host must wait for, such as how many tokens go to each expert: not to be waited for twice.
    """
    return _KNOWN.get()(compute)


class _Known:
    """Values of one run of a block, in the order in which they were computed."""

    def __init__(self) -> None:
        self.values: deque[Any] = deque()

    def learn(self, compute: Callable[[], Value]) -> Value:
        found = compute()
        self.values.append(found)
        return found

    def recall(self, compute: Callable[[], Value]) -> Value:
        return self.values.popleft()  # type: ignore[no-any-return]


class _Kept:
    """Results of one run of a block, in the order in which they were computed."""

    def __init__(self) -> None:
        self.results: deque[Results] = deque()

    def keep(self, compute: Callable[[], Results]) -> Results:
        with _replacing(_WITHIN, _of_parts):
            found = compute()
        # What autograd makes of the results themselves stays out of what is kept.
        self.results.append(tuple(result.detach() for result in found))
        return found

    def give_back(self, compute: Callable[[], Results]) -> Results:
        return tuple(result.detach() for result in self.results.popleft())


How = Callable[[Callable[[], Results]], Results]
_WITHIN: ContextVar[How | None] = ContextVar("within selective recompute", default=None)
"""What ``saved_once`` does in this thread."""


def _of_parts(compute: Callable[[], Results]) -> Results:
    return compute()


def _computed(compute: Callable[[], Any]) -> Any:
    return compute()


_KNOWN: ContextVar[Callable[[Callable[[], Any]], Any]] = ContextVar("within recompute", default=_computed)
"""What ``known_again`` does in this thread."""


@contextmanager
def _replacing(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # A random operator that is left out would shift the numbers of the next one, so their results are kept too; those that
    # write in place cannot be.
    random = torch.Tag.nondeterministic_seeded in operator.tags and not operator._schema.is_mutable
    if _WITHIN.get() is _of_parts:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if operator in KEPT or random else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield
