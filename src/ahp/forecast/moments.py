"""Moments in blocks of 8 bits (``adamw8bit``): which layouts would end a rank's part of a weight within a block."""

from __future__ import annotations

from ahp.engines.ahp import BLOCK_OF_8_BITS, held_in_8_bits
from ahp.forecast.split import split, way_of_keys
from ahp.graph.operators import ModelGraph, Segment


def cut_within_a_block(graph: ModelGraph, degree: int) -> tuple[str, list[int]] | None:
    """Why ``degree`` tensor-parallel ranks cannot hold moments in blocks, and the degrees that can; None where they can."""
    cut = [] if degree == 1 else [found for block in graph.blocks for found in cut_columns(block, degree)]
    bad = next(((name, size) for name, size in cut if size % (degree * BLOCK_OF_8_BITS)), None)
    if bad is None:
        return None
    name, size = bad
    rule = (
        f"would cut the {size} columns of {name} into parts of {size / degree:g}, and job.optimizer.name adamw8bit holds its moments "
        f"in blocks of {BLOCK_OF_8_BITS}"
    )
    tried = range(1, 2 * degree + 1)
    return rule, [d for d in tried if all(columns % (d * BLOCK_OF_8_BITS) == 0 for _, columns in cut)]


def cut_columns(block: Segment, degree: int) -> list[tuple[str, int]]:
    """Trained weights with moments in 8 bits whose last dim ``degree`` ranks divide, and the size of that dim. If a square weight is
    divided, its last dim counts as the divided one."""
    shapes = {p.name: p.shape for p in block.parameters if p.trainable and held_in_8_bits(p.shape)}
    parts = split(block, "block", way_of_keys=way_of_keys(block, degree, "whole"))
    found = []
    for op in block.phase("forward"):
        for name in op.parameters if op.index in parts.column | parts.row else ():
            *_, rows, columns = shapes.get(name, (0, 0))
            outputs = op.outputs[0].shape[-1]
            if columns and columns == (outputs if op.index in parts.column else rows * columns // outputs):
                found.append((name, columns))
    return found
