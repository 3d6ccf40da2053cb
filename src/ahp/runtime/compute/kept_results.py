"""What selective recompute keeps of a block's first run, and how the second run computes the same.

torch's own contexts (``create_selective_checkpoint_contexts``) refuse to return a result that was written into. And with them a random
in-place operator draws other numbers in the second run, if random results before it are kept and so draw none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from ahp.runtime.torch_compat import TorchDispatchMode, local_tensor, memory_of, pytree


class KeptResults:
    """From one run of a block, for each operator in the order of its calls: what it returned, or, for a random in-place operator, the state of
    the generator before it."""

    def __init__(self) -> None:
        self.calls: defaultdict[Any, deque[list[Any]]] = defaultdict(deque)

    def copy_before_write(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Copy kept results that the operator will write into (``out.add_(bias)``), so that they stay what they were."""
        arguments = operator._schema.arguments
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        into = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        written = {memory_of(local_tensor(tensor)) for tensor in _tensors(into)}
        for results in (call for calls in self.calls.values() for call in calls):
            for i, kept in enumerate(results):
                if isinstance(kept, torch.Tensor) and memory_of(local_tensor(kept)) in written:
                    results[i] = kept.clone()


class FirstRun(TorchDispatchMode):
    """Keeps what the second run needs from the operators that ``keeps`` selects."""

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
    """Returns kept results instead of running their operators, and makes random in-place operators draw the same numbers."""

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
    """The result of a random operator with its generator in this state; the generator is left as it was."""
    generator = _generator(args, kwargs)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return operator(*args, **kwargs)
    finally:
        generator.set_state(now)


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that a random operator draws from."""
    if (own := kwargs.get("generator")) is not None:
        return own
    device = _tensors((args, kwargs))[0].device
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
