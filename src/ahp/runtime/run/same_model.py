"""Describes a model beyond its name, since a file can change between two starts: by its config as transformers reads it, or its modules."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

NOT_COMPUTED = {
    "transformers_version", "dtype", "torch_dtype", "architectures", "_name_or_path", "use_cache", "auto_map",
    "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation",
}  # fmt: skip
"""Keys of a config that do not change what a model computes, or that AHP decides itself."""
LIBRARIES = ("torch", "transformers")


def described(model: str | dict[str, Any], module: nn.Module | None = None) -> dict[str, Any]:
    """The model's description as plain data for meta.json. ``module``: the model itself, on any device, if it is already built."""
    from ahp.graph.models import build_model, load_config

    found: dict[str, Any] = {"versions": {name: version(name) for name in LIBRARIES}}
    config: Any = load_config(model)
    if config is None:
        module = build_model(model, device="meta") if module is None else module
        shapes = [f"{name} {tuple(value.shape)}" for name, value in module.named_parameters()]
        found["parameters"] = hashlib.sha256("\n".join(shapes).encode()).hexdigest()
        found["modules"] = re.sub(r" at 0x[0-9a-f]+", "", repr(module)).splitlines()
        config = getattr(module, "config", None)
    if hasattr(config, "to_diff_dict"):
        keys: dict[str, Any] = config.to_diff_dict()
        found["config"] = {key: value for key, value in keys.items() if key not in NOT_COMPUTED}
    return json.loads(json.dumps(found, default=str))


def model_differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What has changed in a model, in words.

    Other library versions describe a model with other keys and modules: then only config keys that both have, and parameters, are compared.
    """
    alike = before.get("versions") == now.get("versions")
    yield from key_differences(before.get("config") or {}, now.get("config") or {}, "model", shared_only=not alike)
    if alike:
        yield from _line_differences(before.get("modules") or [], now.get("modules") or [])
    if before.get("parameters") != now.get("parameters"):
        yield "model: its parameters have other names or shapes"


def key_differences(
    before: dict[str, Any], now: dict[str, Any], prefix: str, *, shared_only: bool = False
) -> Iterator[str]:
    """Keys whose values differ, with both values. A key that one side lacks counts as None, or not at all with ``shared_only``."""
    for key in sorted({*before, *now}):
        old, new, name = before.get(key), now.get(key), f"{prefix}.{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from key_differences(old, new, name, shared_only=shared_only)
        elif old != new and not (shared_only and (key not in before or key not in now)):
            yield f"{name} = {new!r} (the run has {old!r})"


def _line_differences(before: list[str], now: list[str]) -> Iterator[str]:
    """The first place where the modules, as torch prints them, differ."""
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if kind != "equal":
            old, new = (" ".join("".join(part).split()) or "nothing" for part in (before[a0:a1], now[b0:b1]))
            yield f"model: its modules have {new[:200]} (the run has {old[:200]})"
            return
