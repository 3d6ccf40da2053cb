"""How a forward calls the blocks that FSDP2 shards.

FSDP2 gathers a block's weights and sends its gradients when the block is called. Which blocks are called may depend on a rank's own rows:
layers that are dropped at random, an early exit, experts in a list that get no tokens. The messages of one rank would then meet those of
another block on the other ranks. So the hidden states pass through FSDP2's hooks of each block that was left out, at its place in the list.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import ahp
from ahp.errors import BadInput
from ahp.runtime.torch_compat import pass_through, pytree, why_fsdp2_refused


class BlockCalls:
    """The blocks of a stage, each a unit of FSDP2, and how many blocks the running forward has passed. If blocks are called in another
    order, or more than once, all ranks must do the same."""

    def __init__(self, blocks: Sequence[nn.Module], head: nn.Module | None) -> None:
        """``head``: a unit after the blocks."""
        self.blocks = blocks
        self.passed = 0
        units = [*blocks, head] if head is not None else blocks
        for place, module in enumerate(units):
            # Ahead of FSDP2's own hooks.
            module.register_forward_pre_hook(self._before(place), prepend=True, with_kwargs=True)
            module.register_forward_hook(_without_views, prepend=True)

    def run(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What a forward returns. Raises BadInput for what FSDP2 does not let a forward do."""
        self.passed = 0
        return self._pass_to(len(self.blocks), named(forward))

    def _before(self, place: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = None
            if place > self.passed:
                leaves, structure = pytree.tree_flatten((args, kwargs))
                first = next((n for n, leaf in enumerate(leaves) if _is_hidden(leaf)), None)
                if first is not None:
                    leaves[first] = self._pass_to(place, leaves[first])
                    given = pytree.tree_unflatten(leaves, structure)
            self.passed = max(self.passed, place + 1)
            return given

        return before

    def _pass_to(self, place: int, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[self.passed : place]:
            assert isinstance(block, FSDPModule)
            hidden = pass_through(block, hidden)
        return hidden


def named(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a forward returns. Raises BadInput with the model's line for what FSDP2, or weights in 16 bits, do not let it do."""
    try:
        return forward()
    except RuntimeError as error:
        if (fault := why_fsdp2_refused(error)) is not None:
            raise BadInput(f"module: {_own_line(error)} {_FAULTS[fault]} job.precision fp32)") from error
        raise


def _without_views(_: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
    """A block's output with a copy of each view: a view that is changed in place afterwards (``x += y``) loses the hook by which FSDP2 gathers
    the block's weights for backward."""
    return pytree.tree_map(
        lambda leaf: leaf.clone() if _is_hidden(leaf) and leaf.requires_grad and leaf._is_view() else leaf, output
    )


_FAULTS = {
    "not gathered": "reads a weight of a block outside of the block's call, the only time when ZeRO, and any layout in 16 bits, have it whole "
    "(valid: call the block itself, not its methods, and read its weights in its forward; or zero_stage 0 with",
    "written in place": "changes the input of a block in place, which ZeRO, and any layout in 16 bits, have made a view of (valid: x = x + y, not x += y; or zero_stage 0 with",
    "two types": "mixes an fp32 tensor, such as a buffer, with weights in 16 bits (valid: cast the tensor with .to(x.dtype); or",
}


def _is_hidden(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _own_line(error: BaseException) -> str:
    """Where the model's own code raised, beneath which is torch's; a model may have no code of its own."""
    others = Path(torch.__file__).parent, Path(ahp.__file__).parent
    of_dynamo = getattr(error, "real_stack", ())  # lines that it read, and did not run
    for frame in reversed([*traceback.extract_tb(error.__traceback__), *of_dynamo]):
        if not any(map(Path(frame.filename).is_relative_to, others)):
            return f"{frame.filename}:{frame.lineno}"
    return "its forward"
