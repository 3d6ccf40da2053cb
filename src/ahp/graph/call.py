"""How AHP calls a model, and where the logits are in what it returns: one way for the graph and for the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ahp.errors import BadInput


class Sight(NamedTuple):
    """How far a token attends in its document, in tokens before and after itself; None = all tokens."""

    before: int | None = None
    after: int | None = None

    def sees(self, ahead: torch.Tensor) -> torch.Tensor:
        """Whether a query sees a key that is ``ahead`` tokens after it: bool of the shape of ``ahead``."""
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.before is not None:
            seen &= ahead >= -self.before
        if self.after is not None:
            seen &= ahead <= self.after
        return seen


BIDIRECTIONAL, CAUSAL = Sight(), Sight(after=0)


@dataclass(frozen=True)
class Documents:
    """The input that gives a model the documents of a sequence (found by ``ahp.graph.document_mask``)."""

    first_position: int = 0
    """The row of the model's table of positions for the first token of a document."""
    masks: tuple[tuple[str | None, Sight], ...] = ()
    """How far a token sees in its document, for each kind of layer by the model's name for it, or under None for every layer. Empty if the
    model makes its masks from positions that start again: then none is passed, because it would replace the model's own."""
    starts: bool = False
    """Whether the model is given the starts of documents instead of masks, for attention that works with document lengths
    (``ahp.graph.document_starts``)."""

    def arguments(self, position_ids: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments of the model; ``position_ids`` [B, S] is each token's place in its document, from 0.

        A mask is bool [B, 1, S, S], true where a query sees a key: transformers passes such a mask to its blocks unchanged, and gives
        each block its own of several in a mapping. With ``starts`` it is bool [B, 1, 1, S], true at the first token of each document.
        """
        found: dict[str, Any] = {
            "position_ids": position_ids + self.first_position if self.first_position else position_ids
        }
        if not self.masks:
            return found
        if self.starts:
            first = position_ids == 0
            first[:, 0] = True  # a document that began in the previous sequence
            masks = dict.fromkeys((kind for kind, _ in self.masks), first[:, None, None])
            return {**found, "attention_mask": masks.get(None, masks)}
        document = (position_ids == 0).cumsum(1)
        same = document[:, :, None] == document[:, None, :]
        order = torch.arange(position_ids.shape[1], device=position_ids.device)
        ahead = order - order[:, None]
        masks = {
            kind: (same if sight == BIDIRECTIONAL else same & sight.sees(ahead))[:, None] for kind, sight in self.masks
        }
        return {**found, "attention_mask": masks.get(None, masks)}


def model_arguments(
    module: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``module`` for token ids [B, S], and their places in their documents if several share a
    sequence (``documents``: the input that gives them). Nothing else: no cache of keys, and no balance loss of a mixture of experts (the
    runtime computes it from the routers' outputs)."""
    positions = {} if position_ids is None else (documents or Documents()).arguments(position_ids)
    config = getattr(module, "config", None)
    if not hasattr(config, "use_cache") or not hasattr(module, "prepare_inputs_for_generation"):
        return (input_ids,), positions
    no_balance = {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}
    return (), {"input_ids": input_ids, "use_cache": False, **positions, **no_balance}


def call_model(
    module: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> Any:
    """The output of ``module`` for token ids [B, S], and their places in their documents if several share a sequence."""
    args, kwargs = model_arguments(module, input_ids, position_ids, documents)
    return module(*args, **kwargs)


def logits_of(output: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The logits [B, S, V] in a model's output: the tensor itself, ``.logits``, ``["logits"]`` or a tuple's first.

    ``ids``: the token ids [B, S], if the logits must be of all of them. Raises BadInput when there are none, or when they are of another shape.
    """
    if isinstance(output, dict) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, torch.Tensor) and output.dim() == 3:
        if ids is not None:
            refuse_other_tokens(output, ids)
        return output
    what = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    raise BadInput(f"model: its forward returned {what}; logits [batch, sequence, vocabulary] were expected")


def refuse_other_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raises BadInput unless logits [B, S, V] are of tokens [B, S]. nanoGPT's forward, which is given no targets, has those of the last one alone."""
    if logits.shape[:-1] != tokens.shape:
        rule = f"its forward returned logits {list(logits.shape)} for tokens {list(tokens.shape)}, and a loss needs those of every token"
        raise BadInput(f"model: {rule} (valid: a forward that gives them when it gets token ids alone)")
