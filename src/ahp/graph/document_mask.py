"""Whether a model keeps the documents of one sequence apart, when it is told the place of each token in its document.

transformers makes masks from positions that start again, but not for every family, and a user's own module may do anything. So
the model's own forward runs once on a few made-up tokens, up to its blocks: what they are given shows who sees whom.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput, bad_input
from ahp.graph.blocks import NoBlocks, find_blocks
from ahp.graph.call import call_model
from ahp.graph.capture import tensor_leaves

POSITIONS = ((0, 1, 2, 0, 1), (0, 0, 1, 2, 3))
"""Two rows of two documents each, that lie otherwise: a mask that is one for all rows shows too."""

SEEN_ABOVE = -1e4
"""A mask's number that is added to the products: below it a weight is 0 in every precision, exp(-1e4)."""

Calls = list[tuple[int, list[torch.Tensor]]]
"""The number of each block that was called, and the tensors that it was given."""


def check_documents_apart(module: nn.Module) -> None:
    """Raises BadInput where tokens would see other documents, or positions that start again would mean something else.

    Every block must be given a mask [.., sequence, sequence], true where a key is seen or numbers that are added, that hides other
    documents; and the model must count positions from 0, as it does of its own accord.
    """
    if not {"position_ids", "kwargs"} & inspect.signature(module.forward).parameters.keys():
        raise _refused("its forward takes no position_ids")
    probe = _without_memory(module).eval()
    try:
        blocks = find_blocks(probe)
    except NoBlocks as error:
        raise _refused(str(error)) from None
    positions = torch.tensor(POSITIONS)
    given = _calls(probe, list(blocks.blocks), positions)
    missed = sorted(set(range(len(blocks))) - {number for number, _ in given})
    unmasked = [number for number, tensors in given if not any(_keeps_apart(tensor) for tensor in tensors)]
    if missed or unmasked:
        block = f"{blocks.path}.{(missed or unmasked)[0]}"
        raise _refused(f"block {block} is given no mask that hides other documents when positions start again")
    in_order = torch.arange(positions.shape[1]).expand_as(positions)
    if not _alike(_looked_up(probe, in_order), _looked_up(probe, None)):
        raise _refused(
            "it does not count positions from 0, so that those of a document would be others than in a sequence of its own"
        )


def _refused(reason: str) -> BadInput:
    return bad_input("job.document_mask", True, f"the model cannot keep documents apart: {reason}", [False])


def _without_memory(module: nn.Module) -> nn.Module:
    """A copy on the CPU that can run: of every weight, and of buffers on the meta device, one zero stands for all elements."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(zero, requires_grad=False)
    for buffer in module.buffers():
        is_meta = buffer.device.type == "meta"
        memo[id(buffer)] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape) if is_meta else buffer.cpu()
    return copy.deepcopy(module, memo)


class _Done(BaseException):
    """Leaves the forward when the last block is called. Not an Exception: model code must not catch it."""


def _calls(probe: nn.Module, blocks: list[nn.Module], position_ids: torch.Tensor | None) -> Calls:
    """Run the forward on some tokens, with blocks that hand on what the first was given."""
    found: Calls = []

    def standing_for(number: int) -> Callable[..., torch.Tensor]:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            found.append((number, tensor_leaves(args, kwargs)))
            if number == len(blocks) - 1:
                raise _Done
            return found[0][1][0]

        return forward

    for number, block in enumerate(blocks):
        block.forward = standing_for(number)  # type: ignore[method-assign]
    ids = torch.ones(len(POSITIONS), len(POSITIONS[0]), dtype=torch.int64)  # not 0, which most models pad with
    try:
        with torch.no_grad():
            call_model(probe, ids, position_ids)
    except _Done:
        pass
    except Exception as error:
        raise _refused(f"its forward fails on {list(ids.shape)} tokens: {type(error).__name__}: {error}") from error
    return found


def _keeps_apart(tensor: torch.Tensor) -> bool:
    """Whether it is a mask by which a token sees itself and no other document."""
    batch, length = len(POSITIONS), len(POSITIONS[0])
    if tensor.dim() < 2 or tensor.shape[-2:] != (length, length):
        return False
    seen = tensor if tensor.dtype == torch.bool else tensor > SEEN_ABOVE
    seen = seen[(None,) * (4 - seen.dim())].expand(batch, -1, -1, -1)
    starts = torch.tensor(POSITIONS) == 0
    document = starts.cumsum(1)
    apart = (document[:, :, None] != document[:, None, :])[:, None]
    return not bool((seen & apart).any()) and bool(seen.diagonal(dim1=-2, dim2=-1).all())


def _looked_up(probe: nn.Module, position_ids: torch.Tensor | None) -> list[torch.Tensor]:
    """Which rows of its embeddings the model reads before its blocks."""
    found: list[torch.Tensor] = []
    hooks = [
        embedding.register_forward_pre_hook(lambda module, args: found.append(args[0]))
        for embedding in probe.modules()
        if isinstance(embedding, nn.Embedding)
    ]
    try:
        _calls(probe, list(find_blocks(probe).blocks), position_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """One row of positions may stand for all rows."""
    return len(some) == len(others) and all(
        torch.equal(*torch.broadcast_tensors(one, other)) for one, other in zip(some, others, strict=True)
    )
