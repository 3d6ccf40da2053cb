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

from ahp.errors import bad_input
from ahp.graph.capture import tensor_leaves
from ahp.graph.effects import PlainAttributes
from ahp.graph.host_numbers import Generators
from ahp.runtime.compute.kept_results import FirstRun, KeptResults, SecondRun, is_random

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
    aten._flash_attention_forward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What selective recompute does not run again: products with a weight, and fused attention. Batched products do run again: they
are those of unfused attention, whose scores are the largest activation of all."""


def recompute(block: nn.Module, kind: Literal["selective", "full"], forward_context: Context = nullcontext) -> None:
    """Make a block, in place, keep only its inputs, and its products too if ``selective``; backward runs the rest again,
    within ``forward_context``.

    Only its forward is wrapped: parameter names stay, and hooks on the block (FSDP2's) run once, outside.
    """
    forward = block.forward
    owners = [module for module in block.modules() if next(module.buffers(recurse=False), None) is not None]

    attributes, generators = PlainAttributes(block), Generators(block)

    def contexts() -> Contexts:
        known = _Known()
        first, second = _replacing(_KNOWN, known.learn), _both(_replacing(_KNOWN, known.recall), forward_context())
        # ``checkpoint`` gives the second run the state of torch's default generators alone.
        second = _both(generators.from_state(generators.state()), _both(attributes.as_now(), second))
        if owners:
            buffers = BuffersOfFirstRun(owners)
            first, second = _both(buffers.keep(), first), _both(buffers.give_back(), second)
        if kind == "full":
            return first, second
        results, kept = KeptResults(), _Kept()
        keep, again = FirstRun(results, _keeps), SecondRun(results)
        return (
            _both(first, _both(_replacing(_WITHIN, kept.keep), keep)),
            _both(_replacing(_WITHIN, kept.give_back), _both(again, second)),
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = [(x, x._version) for x in tensor_leaves(args, kwargs)]
        output = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if any(x._version != version for x, version in given):
            rule = "a block changes a tensor that it is given in place, and would be given the changed one when it runs again"
            raise bad_input("activation_checkpoint", kind, rule, ["none, or x = x + y, not x += y"])
        return output

    block.forward = run  # type: ignore[method-assign]


def keep_products() -> Contexts:
    """The ``context_fn`` for ``checkpoint`` that keeps the same results in a torch.compile graph."""
    return create_selective_checkpoint_contexts(_policy)


class BuffersOfFirstRun:
    """Gives a block's second run the buffers as the first run found them, so that it computes the same and changes no live buffer."""

    def __init__(self, owners: list[nn.Module]) -> None:
        self.owners = owners
        self.values: dict[nn.Module, dict[str, torch.Tensor | None]] = {}
        """Buffers before the first run, for modules in which it changed one."""

    @contextmanager
    def keep(self) -> Iterator[None]:
        before = {module: dict(module._buffers) for module in self.owners}
        versions = {module: _versions(module) for module in self.owners}
        with torch.no_grad():
            values = {module: {n: _copied(b) for n, b in held.items()} for module, held in before.items()}
        try:
            yield
        finally:
            # Batch norm's kernel writes its averages without raising their version, but its counter's version is raised.
            self.values = {m: values[m] for m in self.owners if _versions(m) != versions[m]}

    @contextmanager
    def give_back(self) -> Iterator[None]:
        live = {module: dict(module._buffers) for module in self.values}
        for module, values in self.values.items():
            module._buffers.update(values)
        try:
            yield
        finally:
            for module, buffers in live.items():
                module._buffers.update(buffers)


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """A value that changes if a module's buffers are written in place, or replaced by other tensors."""
    return [(id(b), b._version) for b in module._buffers.values() if b is not None]


def _copied(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.clone()


def saved_once(compute: Callable[[], Results]) -> Results:
    """What ``compute`` returns; in the second run of selective recompute, what it returned in the first.

    For attention that is not one operator, such as ring attention: the results of its parts are not kept.
    """
    how = _WITHIN.get()
    return compute() if how is None else how(compute)


def known_again(compute: Callable[[], Value]) -> Value:
    """What ``compute`` returns; in the second run of a block, whatever the kind of recompute, what it returned in the first.

    For a few numbers that the host must wait for, such as how many tokens go to each expert: it then waits only once.
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
        with _replacing(_WITHIN, computed):
            found = compute()
        # Detached, so that the autograd graph of the results is not kept with them.
        self.results.append(tuple(result.detach() for result in found))
        return found

    def give_back(self, compute: Callable[[], Results]) -> Results:
        return tuple(result.detach() for result in self.results.popleft())


How = Callable[[Callable[[], Results]], Results]
_WITHIN: ContextVar[How | None] = ContextVar("within selective recompute", default=None)
"""What ``saved_once`` does in this thread."""


def computed(compute: Callable[[], Any]) -> Any:
    """Computes, whatever runs again."""
    return compute()


_KNOWN: ContextVar[Callable[[Callable[[], Any]], Any]] = ContextVar("within recompute", default=computed)
"""What ``known_again`` does in this thread."""


@contextmanager
def _replacing(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _keeps(operator: Any) -> bool:
    # A random operator that is not run again shifts the numbers of the next one, so all random results are kept.
    return _WITHIN.get() is not computed and (operator in KEPT or is_random(operator))


def _policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = _keeps(operator) and not operator._schema.is_mutable
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield
