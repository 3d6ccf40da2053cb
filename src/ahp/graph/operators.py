"""The model graph, and the operators, tensors and parameters that it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ahp.graph.key_heads import Keys, keys_of

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip

Phase = Literal["forward", "backward"]


LOSS = "loss"
"""The module of the loss's operators. It has no kernel of its own: without fusion across modules it runs as torch's operators."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor (``shape`` in elements, ``dtype`` as torch spells it, without ``torch.``)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight. ``name`` is relative to its segment: within a block, or the whole name elsewhere."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the traced forward or backward pass of a segment."""

    index: int
    """Position in its segment's ``operators``; ``depends_on`` refers to it."""
    name: str
    """The framework's name: ``aten.mm``, ``aten._scaled_dot_product_flash_attention``."""
    module: str
    """Module that ran it, relative to the segment; a backward operator carries the module of its forward one."""
    phase: Phase
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    depends_on: tuple[int, ...]
    parameters: tuple[str, ...]
    """Names of the parameters that it reads (also through views and casts)."""
    flops: int
    bytes_read: int
    bytes_written: int
    saved_bytes: int = 0
    """Bytes that autograd keeps from this forward operator's outputs until backward, without parameters."""


@dataclass(frozen=True)
class Segment:
    """A part of the model that is traced once: the part before the blocks, one kind of block, or the part after them."""

    name: str
    operators: tuple[Operator, ...]
    parameters: tuple[Parameter, ...]
    output: TensorSpec | None
    """Its output to the next segment (hidden states); None after the loss."""

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def saved_bytes(self) -> int:
        """Activation bytes kept from forward to backward, for one micro-batch."""
        return sum(op.saved_bytes for op in self.operators)

    def flops(self, phase: Phase | None = None) -> int:
        return sum(op.flops for op in self.operators if phase is None or op.phase == phase)

    def phase(self, phase: Phase) -> Iterator[Operator]:
        return (op for op in self.operators if op.phase == phase)

    @cached_property
    def keys(self) -> Keys:
        """Where keys and values come from, if they have fewer heads than queries."""
        return keys_of(self)


@dataclass(frozen=True)
class ModelGraph:
    """A model's compute graph for one micro-batch: forward, loss and backward, identical blocks held once.

    A repeated block appears once in ``blocks``; ``layers[i]`` says which kind layer ``i`` is. ``at`` gives the
    same graph for another micro-batch size.
    """

    name: str
    model: str | dict[str, Any] | None
    """The plain description it was built from, None for a live module."""
    micro_batch_size: int
    sequence_length: int
    dtype: str
    embedding: Segment
    blocks: tuple[Segment, ...]
    layers: tuple[int, ...]
    head: Segment
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of parameter names that are one tensor; it is counted in the segment that comes first."""
    config: dict[str, Any] = field(default_factory=dict)
    """Facts that rules need: vocab_size, num_attention_heads, num_key_value_heads, hidden_size, num_experts; absent if unknown."""
    document_mask: bool = False
    """Whether the documents of a sequence do not see each other; this graph keeps them apart by masks [sequence, sequence]."""
    by_lengths: ModelGraph | None = field(default=None, repr=False)
    """With ``document_mask``, the same model where attention gets the starts of documents instead of masks, and goes by their lengths; as
    large a micro-batch as was traced. None if there is no such graph."""
    needs_masks: str | None = None
    """Why attention cannot go by the lengths of documents in this model, if ``analyze`` looked and found a reason."""
    lora: dict[str, Any] | None = None
    """The keys of ``job.lora`` whose adapters the graph has, None if all weights are trained."""
    uncuttable: str | None = None
    """Why ``ahp``'s runtime cannot cut the model between its blocks (it runs blocks several times, or passes on more than hidden
    states); None if it can."""
    two_types: str | None = None
    """Why ``ahp``'s runtime cannot compute the model in this ``dtype`` (a buffer in fp32 meets weights in 16 bits); None if it can."""
    several_graphs: str | None = None
    """Why torch.compile makes several graphs of a block, if somebody has looked and found a reason (``runtime/compute/one_graph.py``)."""
    larger: ModelGraph | None = field(default=None, repr=False, compare=False)
    """The same model traced with one more sequence: two points determine what grows with the micro-batch. It has a ``larger``
    of its own when this graph runs other operators than those two, or was made from them by ``at``. None: no law holds, and
    ``at`` refuses."""
    _grown: dict[int, ModelGraph] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Graphs that ``at`` has made, keyed by micro-batch size: clusters and engines ask for the same sizes again."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def other_dims(self) -> str | None:
        """A reason if hidden states are not [batch, sequence, ..] between the blocks, else None."""
        hidden = None if not self.layers else self.blocks[self.layers[-1]].output
        return None if hidden is None else other_dims(hidden.shape, (self.micro_batch_size, self.sequence_length))

    @property
    def layers_of_kinds(self) -> tuple[int, ...]:
        """How many layers are of each kind in ``blocks``."""
        return tuple(map(self.layers.count, range(len(self.blocks))))

    @property
    def num_parameters(self) -> int:
        return (
            self.embedding.num_parameters
            + sum(self.blocks[k].num_parameters for k in self.layers)
            + self.head.num_parameters
        )

    @property
    def trained_share(self) -> float:
        """Fraction of the parameters that is trained: all, or only the adapters."""
        trained = sum(p.numel for segment in self.segments() for p in segment.parameters if p.trainable)
        return trained / max(1, self.num_parameters)

    def segments(self) -> Iterator[Segment]:
        """Every segment in the order of execution, with each repetition of a block."""
        yield self.embedding
        for kind in self.layers:
            yield self.blocks[kind]
        yield self.head

    def flops(self, phase: Phase | None = None) -> int:
        blocks = sum(self.layers.count(kind) * block.flops(phase) for kind, block in enumerate(self.blocks))
        return self.embedding.flops(phase) + blocks + self.head.flops(phase)

    def at(self, micro_batch_size: int) -> ModelGraph:
        """The same graph for another micro-batch size, see ``ahp.graph.growth``; cheap: nothing is traced, and the result is kept."""
        if type(micro_batch_size) is int and micro_batch_size in self._grown:
            return self._grown[micro_batch_size]
        from ahp.graph.growth import at

        grown = at(self, micro_batch_size)
        if grown is not self:
            self._grown[micro_batch_size] = grown
        return grown


def other_dims(hidden: tuple[int, ...], ids: tuple[int, ...]) -> str | None:
    """A reason if hidden states are not [batch, sequence, ..], by their shape and that of the token ids, else None: ranks that share a sequence
    cut it along dim 1, and stages of unlike width rows along dim 0."""
    if hidden[:2] == ids:
        return None
    return f"hidden states between blocks are {list(hidden)} for token ids {list(ids)}, not [batch, sequence, ..]"
