"""The longest sequence that a model takes: a table of positions has an end, and rotary positions are trained up to a length."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.models import build_model, is_transformers, load_config
from ahp.graph.own_modes import own_modes

ROTARY = ("rope", "rotary")
"""Values of ``position_embedding_type`` for rotary positions, in configs with that key: some models of such a family are not rotary."""


@dataclass(frozen=True)
class Positions:
    """The positions of a model, according to its config."""

    longest: int
    """Tokens of the longest sequence."""
    key: str
    """The key of the model's config that sets it."""
    is_table: bool
    """Whether positions are rows of a table, beyond which the model cannot compute; else it computes, but was not made for it."""


def positions_of(module: nn.Module) -> Positions | None:
    """The positions of a transformers model; None if its config sets no limit (ALiBi, no positions at all), or it has no config."""
    config: Any = getattr(module, "config", None)
    if is_transformers(config, "PretrainedConfig"):
        config = config.get_text_config()
    given = getattr(config, "max_position_embeddings", None)
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        return None
    key = getattr(config, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    rows = _rows(module, given)
    if rows is not None:
        return Positions(min(given, rows), key, is_table=True)
    rotary = _rotary(config, given)
    return None if rotary is None else Positions(rotary, key, is_table=False)


@own_modes()
def context_of(model: Any) -> int | None:
    """Tokens of the longest sequence that a model is made for; None if its config does not say so."""
    found = positions_of(build_model(model, device="meta", attention="eager"))
    context = found.longest if found is not None else getattr(load_config(model), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 1 else None


def refuse_longer(module: nn.Module, sequence_length: int) -> None:
    """Raises BadInput if a model would be trained on longer sequences than its config allows."""
    positions = positions_of(module)
    if positions is not None and sequence_length > positions.longest:
        raise BadInput(
            f"job.sequence_length = {sequence_length}: {_words(positions)} (valid: 2 to {positions.longest}; or a model whose "
            f"config says {positions.key} = {sequence_length})"
        )


def warn_of_longer(module: nn.Module, sequence_length: int) -> None:
    """Like ``refuse_longer`` if the model cannot compute that; else a warning: a forecast can be for a model that is yet to be changed."""
    positions = positions_of(module)
    if positions is None or sequence_length <= positions.longest:
        return
    if positions.is_table:
        raise BadInput(
            f"job.sequence_length = {sequence_length}: the model has {positions.longest} positions (valid: 2 to {positions.longest})"
        )
    message = (
        f"job.sequence_length = {sequence_length}: {_words(positions)}; it is forecast anyway, but training refuses it"
    )
    warnings.warn(message, stacklevel=3)


def _words(positions: Positions) -> str:
    return f"the model takes {positions.longest} positions, by {positions.key} of its config"


def _rows(module: nn.Module, given: int) -> int | None:
    """Rows for tokens in the model's table of positions; None if there is no table.

    OPT has two extra rows before the first position. RoBERTa's first rows are for padding, and are counted in ``given``.
    """
    words: Any = module.get_input_embeddings() if is_transformers(module, "PreTrainedModel") else None  # type: ignore[operator]
    tables: list[nn.Module] = [m for m in module.modules() if isinstance(m, nn.Embedding) and m is not words]
    found = [
        m.num_embeddings - (0 if m.padding_idx is None else m.padding_idx + 1)
        for m in tables
        if isinstance(m, nn.Embedding) and given <= m.num_embeddings <= given + 2
    ]
    for part in module.modules():  # GPT-J looks up its rotary angles
        angles = getattr(part, "embed_positions", None)
        if isinstance(angles, torch.Tensor) and angles.shape[0] == given:
            found.append(given)
    return min(found, default=None)


def _rotary(config: Any, given: int) -> int | None:
    """Positions that rotary angles are made for, including scaling; None if the model has none, or they grow with the sequence.

    Configs on the hub give ``max_position_embeddings`` before scaling (Vicuna 16k) or after it (Llama 3.1): the longer counts.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope or getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "rope") not in ROTARY:
        return None
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    if any(kind.get("rope_type") == "dynamic" for kind in kinds):
        return None
    scaled = [
        int(kind["factor"] * (kind.get("original_max_position_embeddings") or given))
        for kind in kinds
        if kind.get("factor")
    ]
    return max([given, *scaled])
