"""Moments in blocks of 8 bits (``adamw8bit``): the weights whose blocks tensor parallelism could cut."""

from __future__ import annotations

from ahp.engines.ahp import held_in_8_bits
from ahp.forecast.split import split, way_of_keys
from ahp.graph.operators import Segment


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
