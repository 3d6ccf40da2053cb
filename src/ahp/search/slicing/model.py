"""The slicing of a whole model: the solution for each kind of block, and the embedding and the head split by vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from ahp.errors import BadInput, bad_input, whole_number
from ahp.graph.capture import Capture
from ahp.graph.operators import ModelGraph
from ahp.graph.outline import Outline, outline
from ahp.graph.own_modes import own_modes
from ahp.job import Lora
from ahp.search.slicing.placement import Split, shape_of
from ahp.search.slicing.solve import SPARING, Slicing, solve
from ahp.search.slicing.words import module_of


@dataclass(frozen=True)
class ModelSlicing:
    """How every weight of a model is split over ``degree`` ranks."""

    outline: Outline
    degree: int
    blocks: tuple[Slicing, ...]
    """One for each kind of block."""
    vocabulary: tuple[str, ...]
    """Modules outside the blocks that are split by vocabulary rows: the token embedding and the head, or neither."""
    sequence_parallel: bool = False
    """Whether the hidden states between the blocks are split along the sequence."""

    def by_module(self) -> dict[str, str]:
        """Module name (``*`` for the layer number) -> column | row | batch | sequence | replicated."""
        words: dict[str, str] = {}
        if self.outline.token_embedding is not None:
            words[self.outline.token_embedding] = "row" if self.vocabulary else "replicated"
        for slicing in self.blocks:
            for weight, word in slicing.words.items():
                words.setdefault(f"{self.outline.blocks_path}.*.{module_of(weight)}", word)
        if self.outline.head is not None:
            words[self.outline.head] = "column" if self.vocabulary else "replicated"
        return words


@own_modes()
def slice_model(model: Any, degree: int, *, enable_sequence_parallel: bool = False) -> ModelSlicing:
    """Solve every kind of block of a model. Raises BadInput when a block cannot be traced or nothing can be split."""
    module = _module_of(model)
    sequence = math.lcm(16, degree)
    found = outline(module, batch_size=2, sequence_length=sequence)
    return slice_outline(found, degree, enable_sequence_parallel=enable_sequence_parallel)


def slice_outline(found: Outline, degree: int, *, enable_sequence_parallel: bool = False) -> ModelSlicing:
    """``slice_model`` for a model whose outline is known."""
    solutions = []
    if found.own_backward is not None:
        rule = f"{found.own_backward} has a backward of its own, and a sliced block has only the backward of torch's operators"
        raise bad_input("tensor_parallel_degree", degree, rule, [1])
    if (reason := found.changes or found.reads_unseen) is not None:
        raise bad_input(
            "tensor_parallel_degree", degree, f"{reason}, and a sliced block is a graph of its forward", [1]
        )
    if found.blocks_keep is not None:
        rule = f"{found.blocks_keep}, and a sliced block is a graph with weights of its own"
        raise bad_input("tensor_parallel_degree", degree, rule, [1, "self of a method"])
    if found.reads_blocks is not None:
        raise bad_input("tensor_parallel_degree", degree, f"{found.reads_blocks}, and a rank has a part of it", [1])
    for captured in found.captures:
        if isinstance(captured, BadInput):
            raise bad_input("tensor_parallel_degree", degree, str(captured), [1])
        hidden = _hidden_of(captured, found) if enable_sequence_parallel else None
        solution = solve(captured, degree, hidden=hidden)
        if not _splits_a_weight(solution):
            raise bad_input(
                "tensor_parallel_degree",
                degree,
                f"no weight of {found.blocks_path}.* can be split into {degree} equal parts; it must divide the attention "
                "heads and the feed-forward width",
                _valid_degrees(captured, degree),
            )
        solutions.append(solution)
    return ModelSlicing(found, degree, tuple(solutions), _vocabulary(found, degree), enable_sequence_parallel)


def _splits_a_weight(solution: Slicing) -> bool:
    return any(isinstance(place, Split) for place in solution.weights.values())


def _valid_degrees(captured: Capture, degree: int) -> list[int]:
    """The nearest degrees, two below and two above at most, that split some weight of a block."""
    ways = (range(degree - 1, 1, -1), range(degree + 1, 2 * degree + 1))
    near = [islice((d for d in way if _splits_a_weight(solve(captured, d, permission=SPARING))), 2) for way in ways]
    return sorted(d for some in near for d in some)


def _hidden_of(captured: Capture, found: Outline) -> int:
    """The number of the activation that holds the hidden states: the first of their shape with a gradient, in the order of arguments."""
    for number, (node, trainable) in enumerate(zip(captured.activation_nodes(), captured.trainable, strict=True)):
        if trainable and shape_of(node) == found.hidden.shape:
            return number
    raise BadInput(
        f"enable_sequence_parallel = True: the blocks {found.blocks_path}.* are not given the hidden states "
        f"{list(found.hidden.shape)} as one tensor"
    )


def _vocabulary(found: Outline, degree: int) -> tuple[str, ...]:
    """The embedding and the head, if the logits come straight from a linear head and the degree divides the vocabulary; else none."""
    if found.head is None or found.token_embedding is None or found.logits.shape[-1] % degree:
        return ()
    return (found.token_embedding, found.head)


def _module_of(model: Any) -> nn.Module:
    from ahp.graph.lora import with_adapters
    from ahp.graph.models import build_model

    if not isinstance(model, ModelGraph):
        return build_model(model)
    if model.model is None:
        raise BadInput("model: this graph was made from a live module; give the module itself to slicing")
    return with_adapters(build_model(model.model), None if model.lora is None else Lora(**model.lora))


def slicing(model: Any, tensor_parallel_degree: int, *, enable_sequence_parallel: bool = False) -> dict[str, str]:
    """How every weight matrix and embedding of a model is split, by module name; ``*`` stands for the layer numbers.

    ``model``: what ``ahp.analyze`` takes, or the graph that it gives.

    Values: ``column`` (n), ``row`` (k), ``batch``, ``sequence`` (m), ``replicated``. Matrices that are bare parameters
    (stacked experts) go by their own name. With ``enable_sequence_parallel`` the hidden states between the products are
    split along the sequence; the norms that work on a part of it are named too. Raises BadInput for a degree below 2 or
    a model whose blocks cannot be traced.

    Example:
        >>> import ahp
        >>> split = ahp.slicing("tiny", 2)
        >>> split["model.layers.*.mlp.up_proj"], split["model.layers.*.mlp.down_proj"]
        ('column', 'row')
    """
    if not isinstance(enable_sequence_parallel, bool):
        raise bad_input("enable_sequence_parallel", enable_sequence_parallel, "must be true or false", [True, False])
    degree = whole_number("tensor_parallel_degree", tensor_parallel_degree, 2)
    return slice_model(model, degree, enable_sequence_parallel=enable_sequence_parallel).by_module()
