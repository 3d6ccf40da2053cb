"""What selective recompute keeps of a block's first run, and how its second run finds the same.

torch's own contexts (``create_selective_checkpoint_contexts``) refuse to give back a result that was written into. And a random operator
that writes in place draws other numbers in the second run, where random results before it are kept and draw none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from ahp.runtime.torch_compat import TorchDispatchMode, local_tensor, memory_of, pytree


class KeptResults:
    """Of one run of a block, by operator in the order of its calls: what it returned; of a random one that writes in place, the state of the
    generator before it."""

    def __init__(self) -> None:
        self.calls: defaultdict[Any, deque[list[Any]]] = defaultdict(deque)

    def copy_before_write(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """What is kept stays what it was, whatever is written into the result later (``out.add_(bias)``)."""
        arguments = operator._schema.arguments
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        into = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        written = {memory_of(local_tensor(tensor)) for tensor in _tensors(into)}
        for results in (call for calls in self.calls.values() for call in calls):
            for i, kept in enumerate(results):
                if isinstance(kept, torch.Tensor) and memory_of(local_tensor(kept)) in written:
                    results[i] = kept.clone()


class FirstRun(TorchDispatchMode):
    """Keeps of the operators of which ``keeps`` says so what the second run needs."""

    def __init__(self, kept: KeptResults, keeps: Callable[[Any], bool]) -> None:
        super().__init__()
        self.kept, self.keeps = kept, keeps

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        keeps, found = self.keeps(func), None
        if _writes(func):
            self.kept.copy_before_write(func, args, kwargs)
            found = [_generator(args, kwargs).get_state()] if keeps else None
        out = func(*args, **kwargs)
        if keeps:
            found = found or ([out] if isinstance(out, torch.Tensor) else out)
            self.kept.calls[func].append([one.detach() if isinstance(one, torch.Tensor) else one for one in found])
        return out


class SecondRun(TorchDispatchMode):
    """Gives results back in the place of running what returned them, and lets what draws in place draw the same."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.kept.calls:
            found = self.kept.calls[func].popleft()
            if not _writes(func):
                return found[0] if len(func._schema.returns) == 1 else tuple(found)
            return _drawn_from(found[0], func, args, kwargs)
        return func(*args, **kwargs)


def is_random(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags


def _writes(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _drawn_from(state: torch.Tensor, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a random operator gives with its generator in this state; the generator stays as it is."""
    generator = _generator(args, kwargs)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return operator(*args, **kwargs)
    finally:
        generator.set_state(now)


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator:
    """That which a random operator draws from."""
    if (own := kwargs.get("generator")) is not None:
        return own
    device = _tensors((args, kwargs))[0].device
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
