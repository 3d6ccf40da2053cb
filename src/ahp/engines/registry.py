"""The engines by name."""

from __future__ import annotations

from ahp.engines.ahp import AhpEngine
from ahp.engines.engine import Engine
from ahp.errors import NotExpressible, bad_input

ENGINES: tuple[Engine, ...] = (AhpEngine(),)
LATER: tuple[str, ...] = ("torchtitan", "megatron", "deepspeed", "accelerate")
"""Engines with a name in a plan that cannot be priced yet."""


def names() -> list[str]:
    """The engines that there are."""
    return [engine.name for engine in ENGINES]


def get(name: str) -> Engine:
    """The engine of that name. Raises NotExpressible for one that is not written yet, BadInput for an unknown one."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    if name in LATER:
        raise NotExpressible(
            f"engine.name = {name!r}: AHP cannot price or export to this engine yet (valid: {', '.join(names())})"
        )
    raise bad_input("engine.name", name, "no such engine", names())
