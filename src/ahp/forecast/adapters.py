"""Low-rank adapters under tensor parallelism: each follows the layer that it adapts.

Next to a column product the adapter's first matrix is whole and the second is split by columns, like the layer. Next to a row product the
first matrix is split by rows, so that ranks sum tensors only as wide as the adapter's rank, and the second is whole. ``ahp.search.slicing``
finds the same, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ahp.graph.lora import adapted_layer
from ahp.graph.operators import Operator


def products_in_parts(
    forward: list[Operator],
    products: set[int],
    columns_and_rows: Callable[[list[Operator], set[int]], tuple[set[int], set[int]]],
) -> set[int]:
    """The weight products of a segment that ranks can divide: of each adapter, one of its two.

    ``columns_and_rows``: which products of the model without adapters are split by columns and by rows, given its forward operators.
    """
    layers = {path for op in forward if (path := adapted_layer(op.module)) is not None}
    if not layers:
        return products
    of_adapters = {op.index for op in forward if adapted_layer(op.module) is not None}
    base = _without(forward, layers, of_adapters)
    column, row = (
        {op.module for op in base if op.index in found} for found in columns_and_rows(base, products - of_adapters)
    )
    kept = {f"{path}.lora_B" for path in layers if f"{path}.base_layer" in column}
    kept |= {f"{path}.lora_A" for path in layers if f"{path}.base_layer" in row}
    return {
        op.index
        for op in forward
        if op.index in products and (op.index not in of_adapters or op.module.rpartition(".")[0] in kept)
    }


def _without(forward: list[Operator], layers: set[str], of_adapters: set[int]) -> list[Operator]:
    """The forward operators as they were before the layers got adapters, without what adapters add to a layer's own result."""
    gone, found = set(of_adapters), []
    for op in forward:
        if op.index in gone:
            continue
        own = tuple(i for i in op.depends_on if i not in gone)
        if op.module in layers and op.depends_on and not own:  # the scale
            gone.add(op.index)
            continue
        # The sum reads the layer's own result first.
        found.append(op if own == op.depends_on else replace(op, inputs=op.inputs[:1], depends_on=own))
    return found
