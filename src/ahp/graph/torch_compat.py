"""Private PyTorch names that the floors below the runtime need too; the rest are in ``ahp.runtime.torch_compat``. Written for 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint as recompute
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "Watching",
    "backward_number",
    "forward_number",
    "memory_of",
    "noting_checkpoints",
    "pytree",
    "scripts_as_python",
    "sets_gradient_mode",
]


class Watching(TorchDispatchMode):
    """Sees every operator with its result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # three of five calls in a trace: autograd asks for it
            return args[0].device
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self.note(func, args, kwargs or {}, out)
        return out

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        raise NotImplementedError


def forward_number() -> int:
    """How many operators autograd has recorded in this thread: the one that now runs in forward has this number minus one."""
    return torch.autograd._get_sequence_nr()


def backward_number() -> int:
    """The forward number of the operator whose backward runs now, -1 for none."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else -1


def memory_of(tensor: torch.Tensor) -> int:
    """A number that is the same for tensors that share memory, even on the meta device, where there is no memory."""
    return tensor.untyped_storage()._cdata


def sets_gradient_mode(target: object) -> bool:
    """Whether a call in a traced graph turns the making of gradients on or off, as its argument says."""
    return target is torch._C._set_grad_enabled


@contextmanager
def scripts_as_python() -> Iterator[None]:
    """Within, functions of ``torch.jit.script`` run as the Python that they were made of. One that has run before brings a backward of its own,
    and a graph that is traced from its forward would have no gradient there."""
    kind: Any = torch.jit.ScriptFunction
    compiled = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(function, "_torchdynamo_inline", None)
        return compiled(function, *args, **kwargs) if python is None else python(*args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = compiled


@contextmanager
def noting_checkpoints(note: Callable[[Any, bool], object]) -> Iterator[None]:
    """Within, each call of ``torch.utils.checkpoint.checkpoint`` calls ``note`` first: with the function, and whether it is reentrant."""
    forward, generator = recompute.CheckpointFunction.forward, recompute._checkpoint_without_reentrant_generator

    def reentrant(ctx: Any, function: Any, *args: Any) -> Any:
        note(function, True)
        return forward(ctx, function, *args)

    def other(function: Any, *args: Any, **kwargs: Any) -> Any:
        note(function, False)
        return generator(function, *args, **kwargs)

    with (
        mock.patch.object(recompute.CheckpointFunction, "forward", staticmethod(reentrant)),
        mock.patch.object(recompute, "_checkpoint_without_reentrant_generator", other),
    ):
        yield
