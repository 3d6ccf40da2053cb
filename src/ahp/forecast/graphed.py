"""Operators of a block that the host launches as parts of a CUDA graph."""

from __future__ import annotations

from collections.abc import Collection

from ahp.forecast.division import GROUPED
from ahp.graph.operators import Segment


def graphed(segment: Segment, parts: Collection[str]) -> frozenset[int]:
    """Operators in the graph of a block. ``parts``: ``attn`` is all up to the sum after attention; ``moe_router`` what follows, up to the
    operators of experts (Megatron-Core d98e8a6, transformer/transformer_config.py, cuda_graph_modules)."""
    if not parts:
        return frozenset()
    of = _parts(segment)
    modules = {(op.module, of[op.index]) for op in segment.phase("forward") if op.module and op.index in of}
    part_of = dict(modules)
    backward = {op.index: part_of.get(op.module) for op in segment.phase("backward")}
    return frozenset(index for index, part in (of | backward).items() if part in parts)


def _parts(segment: Segment) -> dict[int, str]:
    """The part of each operator of the forward pass that is in one."""
    forward = list(segment.phase("forward"))
    attention = next((op.module.split(".")[0] for op in forward if "attention" in op.name), None)
    if attention is None:
        return {}
    last = max(op.index for op in forward if op.module.split(".")[0] == attention)
    after = [op.index for op in forward if op.index > last and op.module]
    middle = after[0] if after else last + 1
    first_expert = next((op.module for op in forward if op.name in GROUPED), None)
    end = next((op.index for op in forward if op.module == first_expert), middle)
    return {op.index: "attn" if op.index < middle else "moe_router" for op in forward if op.index < max(middle, end)}
