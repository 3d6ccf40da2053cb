"""How a graph grows with the micro-batch: two traces, one sequence apart, determine every number for any size.

A size of a tensor is ``constant + slope * b`` (B, B*S, B*heads, or neither of these), so two traces give it exactly.
Bytes are sums of tensors and FLOPs are products over the distinct sizes of an operator's tensors. As long as no single
tensor has two growing sizes, at most one factor of each product grows, so they are of the same form. If one tensor
has two (a product across the batch), the number is taken as ``slope * b + square * b**2``, which is 0 for b = 0.
"""

from __future__ import annotations

from dataclasses import replace

from ahp.errors import BadInput, whole_number
from ahp.graph.operators import ModelGraph, Operator, Segment, TensorSpec


def grows_alike(small: ModelGraph, large: ModelGraph) -> bool:
    """Whether two traces have the same operators, so that one law holds for both."""
    return len(small.blocks) == len(large.blocks) and all(
        [(o.name, o.phase, o.depends_on, len(o.inputs)) for o in a.operators]
        == [(o.name, o.phase, o.depends_on, len(o.inputs)) for o in b.operators]
        for a, b in zip(_parts(small), _parts(large), strict=True)
    )


def at(graph: ModelGraph, micro_batch_size: int) -> ModelGraph:
    """The graph for another micro-batch size. Raises BadInput for a size below 1, or a graph without a ``larger`` one."""
    micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1, "a whole number of sequences, at least 1")
    if micro_batch_size == graph.micro_batch_size:
        return graph
    if graph.larger is None:
        raise BadInput(
            f"micro_batch_size = {micro_batch_size}: {graph.name} runs other operators for other batches; "
            f"analyze it with micro_batch_size={micro_batch_size} instead of {graph.micro_batch_size}"
        )
    # A batch of one often takes a path of its own (a dim of one needs no copy); then the law comes from two and three.
    small, large = (graph.larger, graph.larger.larger) if graph.larger.larger is not None else (graph, graph.larger)
    # The same two traces serve every other size as well.
    grown = _extended(small, large, micro_batch_size)
    larger = replace(small, larger=large, by_lengths=None, needs_masks=None)
    own = {name: getattr(graph, name) for name in ("by_lengths", "needs_masks", "two_types", "several_graphs")}
    return replace(grown, larger=larger, **own)


def _parts(graph: ModelGraph) -> tuple[Segment, ...]:
    return (graph.embedding, *graph.blocks, graph.head)


def _extended(small: ModelGraph, large: ModelGraph, size: int) -> ModelGraph:
    law = _Law(small.micro_batch_size, large.micro_batch_size, size)
    embedding, *blocks, head = (law.segment(a, b) for a, b in zip(_parts(small), _parts(large), strict=True))
    return replace(small, micro_batch_size=size, embedding=embedding, blocks=tuple(blocks), head=head, larger=None)


class _Law:
    """Extends numbers known at ``small`` and ``large`` sequences to ``size`` sequences."""

    def __init__(self, small: int, large: int, size: int) -> None:
        self._small, self._large, self._size = small, large, size
        self._specs: dict[tuple[TensorSpec, TensorSpec], tuple[TensorSpec, int]] = {}

    def number(self, a: int, b: int, square: bool = False) -> int:
        if a == b:
            return a
        if square:
            # slope + square * b passes through a / small and b / large
            curve, rest = divmod(
                b * self._small - a * self._large, self._small * self._large * (self._large - self._small)
            )
            if rest == 0:
                slope = (a - curve * self._small**2) // self._small
                return slope * self._size + curve * self._size**2
        return a + (b - a) * (self._size - self._small) // (self._large - self._small)

    def spec(self, a: TensorSpec, b: TensorSpec) -> TensorSpec:
        return self._grown(a, b)[0]

    def _grown(self, a: TensorSpec, b: TensorSpec) -> tuple[TensorSpec, int]:
        """The extended tensor, and how many of its sizes grow. Kept, because most tensors are read by several operators."""
        found = self._specs.get((a, b))
        if found is None:
            sizes = tuple(self.number(m, n) for m, n in zip(a.shape, b.shape, strict=True))
            growing = sum(m != n for m, n in zip(a.shape, b.shape, strict=True))
            found = self._specs[a, b] = (replace(a, shape=sizes) if growing else a), growing
        return found

    def operator(self, a: Operator, b: Operator) -> Operator:
        inputs, outputs = (
            [self._grown(m, n) for m, n in zip(one, two, strict=True)]
            for one, two in ((a.inputs, b.inputs), (a.outputs, b.outputs))
        )
        square = any(growing > 1 for _, growing in (*inputs, *outputs))
        return Operator(
            a.index,
            a.name,
            a.module,
            a.phase,
            tuple(spec for spec, _ in inputs),
            tuple(spec for spec, _ in outputs),
            a.depends_on,
            a.parameters,
            self.number(a.flops, b.flops, square),
            self.number(a.bytes_read, b.bytes_read, square),
            self.number(a.bytes_written, b.bytes_written, square),
            self.number(a.saved_bytes, b.saved_bytes, square),
        )

    def segment(self, a: Segment, b: Segment) -> Segment:
        return replace(
            a,
            operators=tuple(self.operator(m, n) for m, n in zip(a.operators, b.operators, strict=True)),
            output=None if a.output is None or b.output is None else self.spec(a.output, b.output),
        )
