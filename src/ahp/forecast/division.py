"""Which part of a traced segment one rank computes and keeps: the tensor, sequence and context axes together."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.cluster.model import ProductPhase
from ahp.forecast.split import GROUPED, TensorSplit
from ahp.graph.key_heads import BATCHED
from ahp.graph.operators import DTYPE_BYTES, Operator, Segment


@dataclass(frozen=True)
class Division:
    """A split over ``tensor`` ranks, with or without sequence parallelism, and sequences cut over ``context`` ranks."""

    split: TensorSplit
    tensor: int = 1
    sequence_parallel: bool = False
    """What tensor parallelism leaves whole (norms, residual sums) is cut along the sequence over the same ranks."""
    context: int = 1
    expert: int = 1
    """Ranks that share the experts of a mixture; each computes as many tokens as before, on fewer experts."""

    @property
    def hidden_share(self) -> float:
        """The part of the hidden states that the rank holds between blocks."""
        return (1.0 / self.tensor if self.sequence_parallel else 1.0) / self.context

    @property
    def gathered_bytes(self) -> float:
        """Bytes that a sequence-parallel rank gets from the others, of the activations that column products read whole."""
        if not self.sequence_parallel:
            return 0.0
        whole = sum(spec.bytes for spec in self.split.backward_reduce if len(spec.shape) > 1)
        # The source of whole keys is whole before the norm too, so that the norm's weights need no sum over the ranks.
        whole += sum(spec.bytes for spec in self.split.summed_whole)
        return whole * (1 - 1 / self.tensor) / self.context

    @property
    def row_share(self) -> float:
        """The part of the experts' tokens that the rank has, or its part of each token."""
        return 1.0 / self.tensor / self.context

    def gathers_input(self, op: Operator) -> bool:
        """Whether a forward product reads activations that sequence-parallel ranks gather."""
        return self.sequence_parallel and op.index in self.split.column

    def share(self, op: Operator) -> float:
        """The part of an operator's work that the rank does."""
        if op.index in self.split.masks:
            return 1.0
        if op.index in self.split.keys and op.flops == 0:
            return self.split.keys_share / self.context
        in_parts = op.index in self.split.divided or op.index in self.split.rows
        divided = in_parts or (self.sequence_parallel and op.flops == 0)
        return (1.0 / self.tensor if divided else 1.0) / self.context

    def output_share(self, op: Operator) -> float:
        """The part of an operator's output that the rank holds."""
        if op.index in self.split.keys:
            return self.split.keys_share / self.context
        if op.index in self.split.contracted and not self.sequence_parallel:
            return 1.0 / self.context  # the sum of contracted products is whole
        if is_weight_gradient(op):
            return 1.0 / self.tensor if op.index in self.split.divided else 1.0
        if op.index in self.split.contracted:
            return 1.0 / self.tensor / self.context
        return self.share(op)

    def product(self, op: Operator) -> tuple[float, float, float, float]:
        """(batch, m, n, k) of the products one rank computes; from the output's shape and the FLOPs."""
        batch, m, n, k = product_shape(op)
        if is_weight_gradient(op):
            k /= self.context
        else:
            m /= self.context
        if op.name in GROUPED:
            batch /= self.expert
            more = self.expert / (self.tensor if op.index in self.split.rows else 1)
            m, k = (m, k * more) if is_weight_gradient(op) else (m * more, k)
        degree = self.tensor
        if degree == 1 or op.index not in self.split.divided:
            return batch, m, n, k
        if op.index in self.split.contracted:
            return batch, m, n, k / degree
        if op.parameters:
            return batch, m, n / degree, k
        if batch % degree == 0 and batch > 1:
            return batch / degree, m, n, k
        # A weight gradient: for its time the larger side counts as the split one.
        return (batch, m / degree, n, k) if m > n else (batch, m, n / degree, k)


def product_shape(op: Operator) -> tuple[float, float, float, float]:
    """(batch, m, n, k) of a matrix product as traced: ``batch`` products of [m, k] with [k, n]."""
    out = op.outputs[0]
    n = out.shape[-1] if out.shape else 1
    batch = out.shape[0] if op.name in BATCHED else 1
    if op.name in GROUPED:
        batch = num_experts(op)
        if is_weight_gradient(op):
            return batch, out.shape[-2], n, op.flops / (2.0 * out.numel)
    return batch, out.numel / (batch * n), n, op.flops / (2.0 * out.numel)


def attention_heads(segment: Segment) -> int:
    """Query heads of the segment's fused attention; 0 where it has none."""
    for op in segment.phase("forward"):
        if "attention" in op.name and len(op.inputs[0].shape) == 4:
            return op.inputs[0].shape[1]
    return 0


def num_experts(op: Operator) -> int:
    """Experts of a grouped product: the first dim of its stacked weights, or of their gradient."""
    return next(s.shape[0] for s in (*op.outputs, *op.inputs) if len(s.shape) == 3)


def expert_parameters(segment: Segment) -> frozenset[str]:
    """Stacked weights [experts, ...] that grouped products read."""
    return frozenset(name for op in segment.operators if op.name in GROUPED for name in op.parameters)


def product_bytes(shape: tuple[float, float, float, float], dtype: str) -> float:
    """Bytes that products of (batch, m, n, k) read and write once."""
    batch, m, n, k = shape
    return batch * (m * k + k * n + m * n) * DTYPE_BYTES[dtype]


def product_phase(op: Operator) -> ProductPhase:
    """How the operands of a product lie in memory. A product of two activations counts as a forward one."""
    if op.phase != "backward" or op.name in BATCHED:
        return "forward"
    return "weight_gradient" if is_weight_gradient(op) else "input_gradient"


def is_weight_gradient(op: Operator) -> bool:
    """A product of the backward pass that makes the gradient of a weight: it reads no weight, and is not attention."""
    return (
        op.phase == "backward"
        and op.flops > 0
        and not op.parameters
        and op.name not in BATCHED
        and "attention" not in op.name
    )
