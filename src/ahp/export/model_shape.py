"""Sizes of a model from its description alone, without building it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ahp.errors import NotExpressible
from ahp.graph.catalogue import CATALOGUE
from ahp.graph.models import is_factory, load_config, read_keys


def keys_of(model: str | dict[str, Any]) -> dict[str, Any]:
    """Keys of a model's Hugging Face config. Raises NotExpressible for code, BadInput if there is no such model."""
    if isinstance(model, dict):
        return model
    if model in CATALOGUE:
        return CATALOGUE[model].config
    if is_factory(model):
        raise NotExpressible(
            f"model = {model!r}: it is code, and no other engine has it (valid: a catalogue name or a config.json)"
        )
    if Path(model).expanduser().exists():
        return read_keys(Path(model).expanduser())
    load_config(model)  # raises the reason, with the nearest names
    raise AssertionError(model)


def layers_of(model: str | dict[str, Any]) -> int:
    """Number of blocks of a model. Raises NotExpressible if its config does not have it."""
    keys = keys_of(model)
    found = next((keys[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in keys), None)
    if not isinstance(found, int):
        raise NotExpressible("model: its config has no num_hidden_layers, so the layers of its stages are not known")
    return found
