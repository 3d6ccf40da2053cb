"""Products that an engine computes as one, though the trace has several: what the kernels around them move more and less than traced ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ahp.forecast.split import is_weight_product
from ahp.graph.operators import Operator, Segment


def moved_where_joined(segment: Segment, owner: Mapping[int, int]) -> dict[int, float]:
    """Bytes that operators move more, below 0 less, where one product makes queries, keys and values, and one gate and up.

    Megatron-Core d98e8a6, transformer/attention.py (get_query_key_value_tensors) and Transformer Engine d0067d0 (SplitAlongDim): queries that
    share keys lie apart in the product's output, so that they are copied (reshape), and the gradients of the three are joined by ``torch.cat``.
    The gradient of what the product reads is one tensor, so that no sum reads several. ``owner``: who made the memory of each output.
    """
    more: dict[int, float] = defaultdict(float)
    backward = {name: op for op in segment.phase("backward") for name in op.parameters if op.flops > 0}
    for group in _groups(segment, owner):
        gradients = [backward[name] for op in group for name in op.parameters if name in backward]
        for index, num_bytes in _sums(segment, {op.index for op in gradients}, owner).items():
            more[index] -= num_bytes
        if len(group) == 3:
            for index, num_bytes in _copies(segment, group, gradients, owner).items():
                more[index] += num_bytes
    return more


def products_before_attention(segment: Segment, owner: Mapping[int, int]) -> list[Operator]:
    """The three products that make queries, keys and values of one tensor; empty where there are no such."""
    return next((group for group in _groups(segment, owner) if len(group) == 3), [])


def activations_of_gates(segment: Segment, owner: Mapping[int, int]) -> list[Operator]:
    """The operator of each gate that reads the result of one of its two products alone."""
    pairs = [{op.index for op in group} for group in _groups(segment, owner) if len(group) == 2]
    alone = ((op, {owner[i] for i in op.depends_on}) for op in segment.phase("forward") if op.flops == 0)
    return [op for op, read in alone if op.bytes_written > 0 and any(len(read) == 1 and read <= pair for pair in pairs)]


def _groups(segment: Segment, owner: Mapping[int, int]) -> list[list[Operator]]:
    """Products of one module that read the same tensor: three before attention, or two whose results are multiplied."""
    ops, found = segment.operators, defaultdict[tuple[str, int], list[Operator]](list)
    attention = {op.module for op in segment.phase("forward") if "attention" in op.name}
    for op in segment.phase("forward"):
        if is_weight_product(op):
            read = next((owner[i] for i in op.depends_on if not ops[i].parameters), -1)
            found[op.module.rpartition(".")[0], read].append(op)
    return [
        group
        for (module, _), group in found.items()
        if (len(group) == 3 and module in attention) or (len(group) == 2 and _meet(segment, group, owner))
    ]


def _meet(segment: Segment, pair: Sequence[Operator], owner: Mapping[int, int]) -> bool:
    """Whether a product of elements reads one result of a pair, and something made of the other alone."""
    first, second = (op.index for op in pair)
    made = {first} | {op.index for op in segment.phase("forward") if {owner[i] for i in op.depends_on} == {first}}
    read = ({owner[i] for i in op.depends_on} for op in segment.phase("forward") if op.name == "aten.mul")
    return any(second in sources and sources & made for sources in read)


def _sums(segment: Segment, gradients: set[int], owner: Mapping[int, int]) -> dict[int, float]:
    """The bytes of one summand of each sum of ``gradients`` alone."""
    found: dict[int, float] = {}
    for op in segment.phase("backward"):
        if op.name == "aten.add" and len(op.inputs) == 2 and all(owner[i] in gradients for i in op.depends_on):
            gradients = gradients | {op.index}
            found[op.index] = float(op.outputs[0].bytes)
    return found


def _copies(
    segment: Segment, group: Sequence[Operator], gradients: Sequence[Operator], owner: Mapping[int, int]
) -> dict[int, float]:
    """The copy of queries, read and written with the kernel that turns them, and that of all three gradients."""
    ops, queries = segment.operators, group[0].outputs[0]
    found: dict[int, float] = defaultdict(float)
    attention = next(op for op in segment.phase("forward") if "attention" in op.name)
    turned = [i for i in {owner[i] for i in attention.depends_on} if ops[i].flops == 0]
    if queries.numel > group[1].outputs[0].numel:
        for index in turned:
            found[index] += 2.0 * queries.bytes * (ops[index].outputs[0].numel == queries.numel)
    given = [owner[i] for op in gradients for i in op.depends_on if not ops[i].parameters]
    turned_back = [i for i in dict.fromkeys(given) if ops[i].flops == 0]
    for index in turned_back:
        found[index] += 2.0 * ops[index].outputs[0].bytes
    if turned_back:  # values are not turned
        found[turned_back[0]] += 2.0 * group[2].outputs[0].bytes
    return found
