"""The input with which a model keeps the documents of one sequence apart, and a check that it does.

transformers makes masks from positions that start again, but not for every family; others take a whole mask, or one for each kind of
layer, and pass it on to their blocks. A user's own module can do anything. So the model's own forward runs on a few made-up tokens, up
to its blocks: the blocks' inputs show which token sees which.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ahp.errors import BadInput, bad_input
from ahp.graph.blocks import NoBlocks, find_blocks
from ahp.graph.call import Documents, Sight, model_arguments
from ahp.graph.capture import tensor_leaves
from ahp.graph.initialize import initialize

POSITIONS = ((0, 1, 2, 0, 1), (0, 0, 1, 2, 3))
"""Two rows of two documents each, with different lengths: this also exposes a mask that is the same for all rows."""

FEWEST_TOKENS = 3
"""Tokens of the shortest sequence in which the middle one can be hidden and it still shows who sees the first and the last."""

REPLACED = "a document mask would replace the masks that its blocks get"

SEEN_ABOVE = -1e4
"""Threshold of an additive mask: for a number below it the weight, at most exp(-1e4), is 0 in every precision."""


def documents_apart(module: nn.Module, sequence_length: int) -> Documents:
    """The arguments by which the model keeps documents apart: positions that start again, and a mask if it needs one.

    Raises BadInput if tokens would see other documents, or positions that start again would mean something else: every block must
    be given a mask [.., sequence, sequence] that hides other documents, true where a key is seen, or numbers that are added. A mask
    is passed if the model makes none from positions, and if without it all tokens of ``sequence_length`` see equally far before and
    after themselves. If that differs between blocks, each kind of layer gets its own mask.
    """
    parameters = inspect.signature(module.forward).parameters.keys()
    if not {"position_ids", "kwargs"} & parameters:
        raise NotApart("its forward takes no position_ids")
    try:
        probe = Probe(module)
    except NoBlocks as error:
        raise NotApart(str(error)) from None
    first = probe.first_position()
    documents = Documents(first)
    if (unmasked := probe.unmasked(documents)) is not None and "attention_mask" in parameters:
        documents = Documents(first, probe.own_masks(sequence_length))
        unmasked = probe.unmasked(documents)
    if unmasked is not None:
        raise NotApart(f"block {unmasked} is given no mask that hides other documents when positions start again")
    if not probe.restarts(documents):
        raise NotApart("its positions would differ from those of a document in a sequence of its own")
    return documents


class NotApart(BadInput):
    """A model cannot keep documents apart; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        rule = f"the model cannot keep documents apart: {reason}"
        super().__init__(str(bad_input("job.document_mask", True, rule, [False])))
        self.reason = reason


class Probe:
    """A copy of a model that runs up to its last block."""

    def __init__(self, module: nn.Module) -> None:
        self.model = _without_memory(module).eval()
        self.blocks = find_blocks(self.model)
        padding = getattr(getattr(module, "config", None), "pad_token_id", None)
        self.token = 2 if padding == 1 else 1
        """Not the model's padding token, which can have positions of its own; most models pad with 0."""
        self.positions = torch.tensor(POSITIONS)

    def unmasked(self, documents: Documents) -> str | None:
        """The first block that would see other documents; None if there is none."""
        given = self.given(documents.arguments(self.positions))
        for number in range(len(self.blocks)):
            if not any(_keeps_apart(tensor) for tensor in given.get(number, [])):
                return f"{self.blocks.path}.{number}"
        return None

    def own_masks(self, sequence_length: int) -> tuple[tuple[str | None, Sight], ...]:
        """How far tokens see if nothing is hidden, as in ``Documents.masks``; empty if a block is given no mask at all.

        Raises BadInput if a mask that is passed in would show more or less than the model's own.
        """
        sights = self.sights(sequence_length)
        named = self.named(sights)
        if len(named) > 1:
            self._check_handed_on(named, sights, max(sequence_length, FEWEST_TOKENS))
        return named

    def sights(self, sequence_length: int) -> tuple[Sight, ...]:
        """How far tokens see in each block; empty if a block is given no mask at all.

        transformers makes no mask if it needs none. So one token is declared to be padding, and the mask shows who sees the others.
        Raises BadInput if they do not see equally far.
        """
        length = max(sequence_length, FEWEST_TOKENS)
        padding = length // 2
        padded = torch.ones(len(POSITIONS), length, dtype=torch.int64)
        padded[:, padding] = 0
        given = self.given({"attention_mask": padded})
        masks = [next((t for t in given.get(n, []) if _hides(t, padding)), None) for n in range(len(self.blocks))]
        # All blocks, or all of a kind, are given the same mask.
        distinct = {id(mask): mask for mask in masks if mask is not None}
        found = {one: _sight(mask, padding) for one, mask in distinct.items()}
        return () if any(mask is None for mask in masks) else tuple(found[id(mask)] for mask in masks)

    def named(self, sights: tuple[Sight, ...]) -> tuple[tuple[str | None, Sight], ...]:
        """The sights as in ``Documents.masks``: one for all blocks, or keyed by the config's names for kinds of layers."""
        if len(set(sights)) <= 1:
            return tuple((None, sight) for sight in set(sights))
        kinds = getattr(getattr(self.model, "config", None), "layer_types", None) or ()
        pairs = set(zip(kinds, sights, strict=False))
        if len(kinds) != len(sights) or len({kind for kind, _ in pairs}) < len(pairs):
            raise NotApart(
                f"{REPLACED}, which differ from block to block and have no names in its config (layer_types)"
            )
        return tuple(sorted(pairs))

    def _check_handed_on(
        self, named: tuple[tuple[str | None, Sight], ...], sights: tuple[Sight, ...], length: int
    ) -> None:
        """Raises NotApart unless each block is given its own mask of a mapping of masks."""
        positions = torch.arange(length).expand(len(POSITIONS), -1) % (length // 2)
        arguments = Documents(masks=named).arguments(positions)
        given, handed = self.given(arguments), arguments["attention_mask"]
        own = {sight: handed[kind] for kind, sight in named}
        for number, sight in enumerate(sights):
            if not any(tensor is own[sight] for tensor in given.get(number, [])):
                raise NotApart(f"block {self.blocks.path}.{number} does not get the mask of its kind of layer")

    def first_position(self) -> int:
        """The position from which the model counts by itself."""
        own, ours = (
            self._looked_up({}),
            self._looked_up({"position_ids": torch.arange(self.positions.shape[1]).expand_as(self.positions)}),
        )
        further = _further(own, ours) - {0}
        return further.pop() if len(further) == 1 else 0

    def restarts(self, documents: Documents) -> bool:
        """Whether tokens read the same rows of position tables as in a document by itself."""
        own, ours = self._looked_up({}), self._looked_up(documents.arguments(self.positions))
        return len(own) == len(ours) and _further([self._restarted(rows) for rows in own], ours) <= {0}

    def _restarted(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows at the tokens' places in their documents instead of in the sequence; the tokens are all equal."""
        if rows.dim() > 2 or rows.shape[-1] != self.positions.shape[1]:
            return rows
        return rows.expand(self.positions.shape).gather(1, self.positions)

    def _looked_up(self, arguments: dict[str, Any]) -> list[torch.Tensor]:
        """The rows of its embeddings that the model reads before its blocks."""
        with _LookUps() as found:
            self.given(arguments)
        return found.rows

    def given(self, arguments: dict[str, Any]) -> dict[int, list[torch.Tensor]]:
        """The tensors that each block is called with, keyed by block number. Blocks return the input of the first block."""
        given: dict[int, list[torch.Tensor]] = {}

        def standing_for(number: int) -> Callable[..., torch.Tensor]:
            def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
                given[number] = tensor_leaves(args, kwargs)
                if number == len(self.blocks) - 1:
                    raise _Done
                return next(iter(given.values()))[0]

            return forward

        for number, block in enumerate(self.blocks.blocks):
            block.forward = standing_for(number)  # type: ignore[method-assign]
        shape = next(iter(arguments.values())).shape if arguments else self.positions.shape
        ids = torch.full((shape[0], shape[-1]), self.token)
        try:
            with torch.no_grad():
                args, kwargs = model_arguments(self.model, ids)
                self.model(*args, **kwargs, **arguments)
        except _Done:
            pass
        except Exception as error:
            raise NotApart(f"its forward fails on {list(ids.shape)} tokens: {type(error).__name__}: {error}") from error
        return given


def _without_memory(module: nn.Module) -> nn.Module:
    """A copy on the CPU that can run: one zero stands for all elements of each weight, and of each buffer on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(zero, requires_grad=False)
    tables = _integers(module)
    for name, buffer in module.named_buffers():
        zeros = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
        memo[id(buffer)] = tables.get(name, zeros if buffer.is_meta else buffer.cpu())
    return copy.deepcopy(module, memo)


def _integers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of integers on the meta device, which may number positions, with their initial values."""
    names = [name for name, buffer in module.named_buffers() if buffer.is_meta and not buffer.is_floating_point()]
    if not names:
        return {}
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in module.parameters()}
    memo.update({id(buffer): torch.zeros_like(buffer, device="cpu") for buffer in module.buffers()})
    initialised = copy.deepcopy(module, memo)
    initialize(initialised)
    return {name: initialised.get_buffer(name) for name in names}


class _Done(BaseException):
    """Leaves the forward when the last block is called. Not an Exception: model code must not catch it."""


class _LookUps(TorchFunctionMode):
    """Records the rows that are read: a module can be called with something else (OPT's is given a mask, and counts)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding:
            self.rows.append(args[0])
        return func(*args, **(kwargs or {}))


def _further(some: list[torch.Tensor], others: list[torch.Tensor]) -> set[int]:
    """All differences between rows of the first and of the second. One row of positions can stand for all."""
    return {int(more) for one, other in zip(some, others, strict=False) for more in (one - other).unique()}


def _keeps_apart(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a mask with which each token sees itself and no other document."""
    batch, length = len(POSITIONS), len(POSITIONS[0])
    if tensor.dim() < 2 or tensor.shape[-2:] != (length, length):
        return False
    seen = _seen(tensor)
    seen = seen[(None,) * (4 - seen.dim())].expand(batch, -1, -1, -1)
    starts = torch.tensor(POSITIONS) == 0
    document = starts.cumsum(1)
    apart = (document[:, :, None] != document[:, None, :])[:, None]
    return not bool((seen & apart).any()) and bool(seen.diagonal(dim1=-2, dim2=-1).all())


def _hides(tensor: torch.Tensor, padding: int) -> bool:
    """Whether a tensor is a mask with which no other token sees the one at ``padding``."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2]:
        return False
    seen = _seen(tensor[..., padding])
    return not bool(seen[..., :padding].any() or seen[..., padding + 1 :].any())


def _sight(mask: torch.Tensor, padding: int) -> Sight:
    """How far all tokens see with a mask of one document that hides one token. Raises BadInput if it is not boolean, or they see unequally far."""
    if mask.dtype != torch.bool:
        raise NotApart("its attention is not fused, and only scaled_dot_product_attention takes a mask")
    length = mask.shape[-1]
    order = torch.arange(length)
    known = order != padding
    seen, ahead = mask[..., known], (order - order[:, None])[:, known]
    far = ahead[seen.flatten(0, -3)[0]] if seen.dim() > 2 else ahead[seen]
    before, after = -int(far.min()), int(far.max())
    sight = Sight(before if before < length - 1 else None, after if after < length - 1 else None)
    if not bool((seen == sight.sees(ahead)).all()):
        raise NotApart(f"{REPLACED}, and by these tokens do not see equally far")
    return sight


def _seen(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > SEEN_ABOVE
