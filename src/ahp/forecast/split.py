"""Which operators of a segment tensor parallelism divides, and what it must reduce; from the graph alone.

A weight product is an operator with FLOPs that reads a parameter. Going through a block, the first product
after whole activations is split by columns, the last before whole activations again is split by rows, and what
lies between them works on a part (arXiv 1909.08053). So an operator is inside when every path to it from the
block's input, and every path from it to the block's output, passes a weight product. ``ahp.search.slicing.solve``
decides the real split, tensor by tensor; this rule is what the forecast needs of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

from ahp.engines.ahp import FP8_MULTIPLE
from ahp.engines.traits import ExpertTraits, FewKeys
from ahp.forecast.adapters import products_in_parts
from ahp.graph.key_heads import leads_to_attention
from ahp.graph.operators import Operator, Segment, TensorSpec

GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback_backward")
"""Products of each expert's tokens with the expert's own weights."""

Role = Literal["block", "embedding", "head"]

KeysWay = Literal["parts", "whole", "gathered", "whole attention"]
"""parts: each rank makes the keys and values of its own heads. whole: every rank makes all keys and values, and attends to the head that
its query heads share. gathered: ranks divide the products and gather their results. whole attention: every rank computes all attention."""


@dataclass(frozen=True)
class TensorSplit:
    """What a tensor-parallel group divides of one segment, and the tensors it all-reduces for one micro-batch."""

    divided: frozenset[int] = frozenset()
    """Operators (forward and backward) whose work is divided by the degree."""
    column: frozenset[int] = frozenset()
    row: frozenset[int] = frozenset()
    """Forward weight products by how their weight is split."""
    contracted: frozenset[int] = frozenset()
    """Divided products whose inner dimension is the split one: row products forward, the input gradient of column
    products backward."""
    parameters: frozenset[str] = frozenset()
    """Parameters of which each rank holds a part."""
    forward_reduce: tuple[TensorSpec, ...] = ()
    """Tensors all-reduced in the forward pass: the output of each row product, or of the embedding."""
    backward_reduce: tuple[TensorSpec, ...] = ()
    """Gradients all-reduced in the backward pass: one for each whole activation that column products read."""
    masks: frozenset[int] = frozenset()
    """Operators that make attention masks over pairs of tokens, the same for all heads: whole on every rank."""
    keys: frozenset[int] = frozenset()
    """Operators that make keys and values of fewer heads than there are ranks, or their gradients; or what every rank does to gathered heads."""
    keys_share: float = 1.0
    """The part of the results of ``keys`` that a rank has."""
    key_gradients: tuple[TensorSpec, ...] = ()
    """Whole keys and values, whose gradients are all-reduced in the backward pass: each rank has the gradients of its own query heads."""
    summed_whole: tuple[TensorSpec, ...] = ()
    """Tensors of ``backward_reduce`` that whole keys are made of too: their gradients are all-reduced even under sequence parallelism,
    since every rank has the whole of one summand."""
    tokens_summed: tuple[tuple[TensorSpec, TensorSpec], ...] = ()
    """Tensors of ``backward_reduce`` that experts get copies of, and what is all-reduced in the backward pass instead, even under sequence
    parallelism: the tokens' gradients, or those of the copies."""
    whole_weights: tuple[TensorSpec, ...] = ()
    """Weights of one dim that every rank holds whole: sequence-parallel ranks read them in parts."""
    weights_in_parts: tuple[TensorSpec, ...] = ()
    """Those among them that all tensor-parallel ranks read in parts."""
    rows: frozenset[int] = frozenset()
    """Products of whole experts with the tokens that a tensor-parallel rank has or receives: its part of all rows."""
    gathered_heads: tuple[TensorSpec, ...] = ()
    """Outputs of column products that are gathered before attention; their gradients are reduce-scattered."""
    normed_heads: tuple[TensorSpec, ...] = ()
    """Outputs of norms of heads that are gathered before attention; each rank has the gradients of its own heads."""


def way_of_keys(block: Segment, degree: int, few: FewKeys) -> KeysWay:
    """How ``degree`` ranks make the keys and values of a block. ``few``: what the engine does where ranks are more than key heads."""
    keys = block.keys
    if keys.heads == 0 or keys.heads % degree == 0 or few == "refused":
        return "parts"
    if few == "gathered":
        return "gathered"
    return "whole" if keys.products and degree % keys.heads == 0 else "whole attention"


def is_weight_product(op: Operator) -> bool:
    """An operator with FLOPs that reads a parameter."""
    return op.flops > 0 and bool(op.parameters)


def split(
    segment: Segment,
    role: Role,
    *,
    experts: ExpertTraits | None = None,
    way_of_keys: KeysWay = "parts",
    gathers_normed: bool = False,
) -> TensorSplit:
    """The split of one segment; see the module docstring for the rule of a block.

    ``embedding``: the table is split by vocabulary and its output reduced. ``head``: the last weight product is
    split by vocabulary and everything after it, the loss included, works on a part of the logits.
    ``experts``: how the engine runs experts; None = as Megatron. ``way_of_keys``: how ranks make the keys and values of a block.
    ``gathers_normed``: see ``TensorTraits``.
    """
    forward = list(segment.phase("forward"))
    products = {op.index for op in forward if is_weight_product(op)}
    experts = experts or ExpertTraits()
    if experts.whole_biased:
        products -= _of_biased_experts(forward)
    if role == "block":

        def split_of_base(operators: list[Operator], some: set[int]) -> tuple[set[int], set[int]]:
            base = _divided(segment, operators, some, role, "parts")
            return set(base.column), set(base.row)

        products = products_in_parts(forward, products, split_of_base)
    if experts.folded and role == "block":
        rows = frozenset(op.index for op in segment.operators if op.name in GROUPED)
        found = replace(_divided(segment, forward, products - rows, role, way_of_keys), rows=rows)
    else:
        found = _divided(segment, forward, products, role, way_of_keys)
        if experts.sums_tokens != "nowhere":
            found = _with_summed_tokens(segment, forward, found, both=experts.sums_tokens == "both passes")
    found = _with_whole_weights(segment, forward, found) if role == "block" else found
    return _with_normed_heads(forward, found) if gathers_normed and way_of_keys == "parts" else found


def _divided(
    segment: Segment, forward: list[Operator], products: set[int], role: Role, way_of_keys: KeysWay
) -> TensorSplit:
    """``split`` where ``products`` are the only ones that can be divided."""
    if way_of_keys == "whole attention" and role == "block":
        products -= leads_to_attention(forward, products)
    whole_before = _reached_whole(segment, forward, products)
    whole_after = _leads_to_whole(forward, products, segment.output)
    if role == "embedding":
        return _embedding(segment, forward)
    if role == "head":
        return _head(segment, forward, products)
    column = products - whole_after
    column -= _narrow(forward, column, products)
    # A product between whole activations on both sides has no partner to share a split with: it stays whole.
    row = (products & whole_after) - whole_before
    masks = _masks(segment, forward)
    inside = {op.index for op in forward} - whole_before - whole_after - masks
    if way_of_keys == "whole":
        return replace(_with_whole_keys(segment, forward, inside, column, row), masks=frozenset(masks))
    found = replace(_finish(segment, forward, inside | column | row, column, row), masks=frozenset(masks))
    return _with_gathered_heads(segment, forward, found) if way_of_keys == "gathered" else found


def _with_whole_keys(
    segment: Segment, forward: list[Operator], inside: set[int], column: set[int], row: set[int]
) -> TensorSplit:
    """The split where every rank makes all keys and values: neither their products nor the operators up to attention are divided."""
    by_index, keys = {op.index: op for op in forward}, segment.keys
    whole = keys.products | keys.between
    sources = {_source(by_index[i], by_index) for i in keys.products & column}
    column = column - keys.products
    found = _finish(segment, forward, (inside - whole) | column | row, column, row)
    also = dict.fromkeys(i for i in (_source(by_index[i], by_index) for i in sorted(column)) if i in sources)
    summed = (by_index[i].outputs[0] if i in by_index else segment.output for i in also)
    backward = _backward_of_keys(segment)
    return replace(
        found,
        divided=found.divided - backward,
        keys=frozenset(whole | backward),
        key_gradients=tuple(by_index[i].outputs[0] for i in keys.read),
        summed_whole=tuple(spec for spec in summed if spec is not None),
    )


def _with_gathered_heads(segment: Segment, forward: list[Operator], found: TensorSplit) -> TensorSplit:
    """The split where ranks divide the products before attention and gather the results; each takes its query heads and their key head."""
    by_index, keys = {op.index: op for op in forward}, segment.keys
    before = leads_to_attention(forward, set(found.column | found.row)) & found.column
    return replace(
        found,
        keys=frozenset(keys.products | keys.between | _backward_of_keys(segment)),
        keys_share=1.0 / keys.heads,
        gathered_heads=tuple(by_index[i].outputs[0] for i in sorted(before)),
    )


def _with_whole_weights(segment: Segment, forward: list[Operator], found: TensorSplit) -> TensorSplit:
    divided = found.divided - found.row  # a bias is added to what row products have summed
    of_part = {name for op in forward if op.index in divided for name in op.parameters}
    dtype = segment.output.dtype if segment.output is not None else "float32"
    whole = {
        p.name: TensorSpec(p.shape, dtype)
        for p in segment.parameters
        if len(p.shape) == 1 and p.trainable and p.name not in found.parameters
    }
    in_parts = (spec for name, spec in whole.items() if name in of_part)
    return replace(found, whole_weights=tuple(whole.values()), weights_in_parts=tuple(in_parts))


def _with_summed_tokens(segment: Segment, forward: list[Operator], found: TensorSplit, *, both: bool) -> TensorSplit:
    """The split where the results of a token's experts, shared ones too, are added up before ranks add theirs, so that it is gathered and
    reduced once, not once for each expert. ``both``: and so are the gradients of a token's copies."""
    by_index = {op.index: op for op in forward}

    def of_tokens(copies: int) -> int:
        return _source(by_index[copies], by_index) if copies in by_index else copies

    def spec(index: int) -> TensorSpec | None:
        return by_index[index].outputs[0] if index in by_index else segment.output

    grouped = {i for i in found.column | found.row if by_index[i].name in GROUPED}
    copied = {_source(by_index[i], by_index) for i in grouped & found.column}
    if not copied:
        return found
    sources = [_source(by_index[i], by_index) for i in sorted(found.column)]
    inputs = dict.fromkeys(of_tokens(i) if i in copied else i for i in sources)
    mixture = {by_index[i].module.rpartition(".")[0] + "." for i in grouped} - {"."}
    rows = [i for i in sorted(found.row) if i in grouped or not by_index[i].module.startswith(tuple(mixture))]
    tokens, *_ = (spec(of_tokens(i)) for i in copied)
    summed = [(spec(of_tokens(i)), spec(of_tokens(i) if both else i)) for i in sorted(copied)]
    return replace(
        found,
        forward_reduce=tuple(tokens if i in grouped and tokens else by_index[i].outputs[0] for i in rows),
        backward_reduce=tuple(one for one in map(spec, inputs) if one is not None),
        tokens_summed=tuple((one, other) for one, other in summed if one is not None and other is not None),
    )


def _with_normed_heads(forward: list[Operator], found: TensorSplit) -> TensorSplit:
    """The split where ranks gather what norms make of their heads, and each works on all heads until it takes its own for attention."""
    norms = {op.module: op for op in forward if op.index in found.divided and _norms_heads(op)}
    last, whole = {op.index for op in norms.values()}, set[int]()
    for op in forward:
        if op.flops == 0 and (last | whole) & set(op.depends_on):
            whole.add(op.index)
    return replace(
        found, keys=frozenset(whole), keys_share=1.0, normed_heads=tuple(op.outputs[0] for op in norms.values())
    )


def _norms_heads(op: Operator) -> bool:
    """Whether an operator ends a norm of [batch, tokens, heads, width]."""
    return op.flops == 0 and op.bytes_written > 0 and bool(op.parameters) and len(op.outputs[0].shape) == 4


def _backward_of_keys(segment: Segment) -> set[int]:
    """Backward operators whose result has the shape of keys (4 dims), in the modules of the operators between keys and attention."""
    by_index, keys = {op.index: op for op in segment.operators}, segment.keys
    modules = {by_index[i].module for i in keys.between}
    shapes = {by_index[i].outputs[0].shape for i in keys.between if len(by_index[i].outputs[0].shape) == 4}
    return {
        op.index
        for op in segment.phase("backward")
        if op.flops == 0 and op.module in modules and op.outputs and op.outputs[0].shape in shapes
    }


def is_mask(spec: TensorSpec) -> bool:
    """Whether a tensor has the shape of a mask for all heads: [batch, 1, tokens, tokens]."""
    shape = spec.shape
    return len(shape) == 4 and shape[1] == 1 and shape[2] == shape[3] > 1


def _masks(segment: Segment, forward: list[Operator]) -> set[int]:
    """Operators that make masks from masks alone: neither hidden states nor weights go into them."""
    by_index = {op.index: op for op in forward}
    weights = {p.name: p.numel for p in segment.parameters}
    reached: set[int] = set()
    for op in forward:
        if op.parameters or _reads_input(op, by_index, weights, segment.output) or reached & set(op.depends_on):
            reached.add(op.index)
    return {op.index for op in forward if op.index not in reached and op.outputs and is_mask(op.outputs[0])}


def in_8_bits(block: Segment, num_experts: int | None, way_of_keys: KeysWay = "parts") -> list[tuple[str, int | None]]:
    """The weights of linear layers that the native engine multiplies in 8 bits, and the dim of each that tensor parallelism
    cuts (elements; None = it stays whole). A layer with as many outputs as there are experts is a router, and left out."""
    shapes, found = {p.name: p.shape for p in block.parameters}, []
    parts = split(block, "block", way_of_keys=way_of_keys)
    for op in block.phase("forward"):
        name = f"{op.module}.weight"
        if not is_weight_product(op) or name not in op.parameters or len(shapes[name]) != 2:
            continue
        outputs = op.outputs[0].shape[-1]
        if outputs == num_experts or any(size % FP8_MULTIPLE for size in shapes[name]):
            continue
        inputs = shapes[name][0] * shapes[name][1] // outputs
        found.append((name, outputs if op.index in parts.column else inputs if op.index in parts.row else None))
    return found


def _reached_whole(segment: Segment, forward: list[Operator], products: set[int]) -> set[int]:
    """Operators that whole activations reach from the segment's input without passing a weight product."""
    by_index = {op.index: op for op in forward}
    weights = {p.name: p.numel for p in segment.parameters}
    hands_on: set[int] = set()
    reached: set[int] = set()
    for op in forward:
        if _reads_input(op, by_index, weights, segment.output) or any(i in hands_on for i in op.depends_on):
            reached.add(op.index)
            if op.index not in products:
                hands_on.add(op.index)
    return reached


def _reads_input(
    op: Operator, by_index: dict[int, Operator], weights: dict[str, int], hidden: TensorSpec | None
) -> bool:
    """Whether an input of the size of the hidden states comes from no operator of the segment and is no weight."""
    if hidden is None:
        return not op.depends_on
    read = sum(_may_be(spec, hidden) for spec in op.inputs)
    read -= sum(weights.get(name) == hidden.numel for name in op.parameters)
    made = sum(_may_be(spec, hidden) for i in _activations(op, by_index) for spec in by_index[i].outputs)
    return read > made


def _may_be(spec: TensorSpec, hidden: TensorSpec) -> bool:
    """Whether a tensor has the size of the hidden states. A mask [1, 1, sequence, sequence] can have it too, but has more dims."""
    return spec.numel == hidden.numel and len(spec.shape) <= len(hidden.shape)


def _activations(op: Operator, by_index: dict[int, Operator]) -> list[int]:
    """The forward operators that ``op`` reads from, without views of weights."""
    read = [i for i in op.depends_on if i in by_index]
    return [i for i in read if by_index[i].bytes_written > 0 or not by_index[i].parameters]


def _leads_to_whole(forward: list[Operator], products: set[int], hidden: TensorSpec | None) -> set[int]:
    """Operators from which a path leads to the segment's output without passing another weight product."""
    consumers = _consumers(forward)
    leads: set[int] = set()
    for op in reversed(forward):
        after = consumers[op.index]
        is_output = not after and (hidden is None or any(s.numel == hidden.numel for s in op.outputs))
        if is_output or any(c in leads and c not in products for c in after):
            leads.add(op.index)
    return leads


def _narrow(forward: list[Operator], column: set[int], products: set[int]) -> set[int]:
    """Column products whose result another column product reads whole: projections to a latent space, and routers. They stay whole."""
    consumers = _consumers(forward)
    leads: set[int] = set()
    for op in reversed(forward):
        if any(c in column or (c in leads and c not in products) for c in consumers[op.index]):
            leads.add(op.index)
    return column & leads


def _of_biased_experts(forward: list[Operator]) -> set[int]:
    """Products of experts whose module adds a bias to the last product's result, so that this result is no summand."""
    by_index = {op.index: op for op in forward}
    last = {op.module: op.index for op in forward if op.name in GROUPED}
    biased = {
        op.module
        for op in forward
        if op.name.startswith("aten.add")
        and last.get(op.module) in op.depends_on
        and any(by_index[i].parameters and i != last[op.module] for i in op.depends_on)
    }
    return {op.index for op in forward if op.name in GROUPED and op.module in biased}


def _consumers(forward: list[Operator]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for op in forward:
        for i in op.depends_on:
            found[i].append(op.index)
    return found


def _finish(
    segment: Segment, forward: list[Operator], inside: set[int], column: set[int], row: set[int]
) -> TensorSplit:
    by_index = {op.index: op for op in forward}
    sources = dict.fromkeys(_source(by_index[i], by_index) for i in sorted(column))
    wholes = tuple(by_index[i].outputs[0] if i in by_index else segment.output for i in sources)
    return TensorSplit(
        divided=frozenset(inside | _backward_inside(segment, forward, inside, column | row)),
        column=frozenset(column),
        row=frozenset(row),
        contracted=frozenset(row | _input_gradients(segment, {by_index[i].module for i in column})),
        parameters=_split_parameters(segment, by_index, column, row),
        forward_reduce=tuple(by_index[i].outputs[0] for i in sorted(row)),
        backward_reduce=tuple(spec for spec in wholes if spec is not None),
    )


def _input_gradients(segment: Segment, modules: set[str]) -> set[int]:
    """Backward products of the modules that read a weight: they make the gradient of the module's input."""
    return {op.index for op in segment.phase("backward") if is_weight_product(op) and op.module in modules}


def _source(op: Operator, by_index: dict[int, Operator]) -> int:
    """The operator that made the activation a product reads, looking through views; -1 for the segment's input."""
    for i in _activations(op, by_index):
        return i if by_index[i].bytes_written > 0 else _source(by_index[i], by_index)
    return -1


def _split_parameters(
    segment: Segment, by_index: dict[int, Operator], column: set[int], row: set[int]
) -> frozenset[str]:
    """Weights of both kinds, and biases of column products (a bias after a row product is added once, whole)."""
    dims = {p.name: len(p.shape) for p in segment.parameters}
    names = {name for i in column for name in by_index[i].parameters}
    names |= {name for i in row for name in by_index[i].parameters if dims.get(name, 0) >= 2}
    return frozenset(names)


def _backward_inside(segment: Segment, forward: list[Operator], inside: set[int], products: set[int]) -> set[int]:
    """Backward operators that are divided, by the module of their forward operators.

    Products of a module with a divided product are divided. Others follow the larger part of the bytes that
    their module's other forward operators write.
    """
    split_modules = {op.module for op in forward if op.index in products}
    inside_bytes: dict[str, int] = defaultdict(int)
    all_bytes: dict[str, int] = defaultdict(int)
    for op in forward:
        if op.index not in products:
            all_bytes[op.module] += op.bytes_written
            inside_bytes[op.module] += op.bytes_written if op.index in inside else 0
    divided = set()
    for op in segment.phase("backward"):
        of_product = op.flops > 0 and op.module in split_modules
        if of_product or 2 * inside_bytes[op.module] > all_bytes[op.module]:
            divided.add(op.index)
    return divided


def _embedding(segment: Segment, forward: list[Operator]) -> TensorSplit:
    tables = {p.name for p in segment.parameters if len(p.shape) == 2}
    reads = [op for op in forward if tables & set(op.parameters) and op.bytes_written > 0]
    largest = max((p.numel for p in segment.parameters if len(p.shape) == 2), default=0)
    vocabulary = {p.name for p in segment.parameters if len(p.shape) == 2 and p.numel == largest}
    lookups = [op for op in reads if vocabulary & set(op.parameters)]
    return TensorSplit(
        row=frozenset(op.index for op in lookups),
        parameters=frozenset(vocabulary) if lookups else frozenset(),
        forward_reduce=tuple(op.outputs[0] for op in lookups),
    )


def _head(segment: Segment, forward: list[Operator], products: set[int]) -> TensorSplit:
    if not products:
        return TensorSplit()
    by_index = {op.index: op for op in forward}
    last = max(products)
    after = {last}
    for op in forward:
        if op.index > last and any(i in after for i in op.depends_on):
            after.add(op.index)
    modules_before = {op.module for op in forward if op.index < last} - {by_index[last].module}
    backward = {op.index for op in segment.phase("backward") if op.module not in modules_before}
    logits = by_index[last].outputs[0]
    rows = TensorSpec((logits.numel // logits.shape[-1],), "float32")
    source = _source(by_index[last], by_index)
    return TensorSplit(
        divided=frozenset(after | backward),
        column=frozenset({last}),
        contracted=frozenset(_input_gradients(segment, {by_index[last].module})),
        parameters=frozenset(by_index[last].parameters),
        # The loss over a split vocabulary reduces the row maximum, the row sum and the target's logit.
        forward_reduce=(rows, rows, rows),
        backward_reduce=(by_index[source].outputs[0],) if source in by_index else (),
    )
