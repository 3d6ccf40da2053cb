"""Recipes by which engines compute products in 8 bits: what casts move and hold, and what stays in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

Pair = tuple[float, float]
Kept = Literal["in_8_bits", "in_16_bits", "made_again"]


@dataclass(frozen=True)
class Fp8Recipe:
    """How an engine computes products with a weight in 8 bits, if the job asks for it."""

    forward_cast_bytes: Pair
    """Bytes that casts move for one element of the first and of the second operand of a forward product."""
    input_gradient_cast_bytes: Pair
    """The same for the product that makes the gradient of a layer's input."""
    weight_gradient_cast_bytes: Pair
    """The same for the product that makes the gradient of a weight."""
    temporary_bytes: float
    """Bytes of memory for one element of the largest operand while it is cast."""
    gathers_in_8_bits: bool
    """Whether sequence parallelism gathers the inputs of products in 8 bits; else in 16."""
    casts_once: bool
    """Whether an input that several products read (queries, keys and values; gate and up) is cast once for all of them; else once for each."""
    keeps: Kept
    """How an input is kept for weight gradients: in 8 bits, in 16, or not at all if an element-wise kernel makes it again from what is kept."""
    experts: bool
    """Whether products of stacked experts are in 8 bits too."""
    shares_scales: bool
    """Whether ranks with parts of an operand agree on its scale, one number, by an all-reduce."""
    casts_own_part: bool = False
    """Whether a sequence-parallel rank casts its own part of an input before it is gathered; else each rank casts all that it has gathered."""
    attention: bool = False
    """Whether the products of fused attention are in 8 bits too."""
    fused_experts: bool = False
    """Whether products of stacked experts are one kernel, together with the activation between them and its casts."""


NVIDIAS_FP8 = Fp8Recipe(
    (4, 0),
    (4, 0),
    (0, 0),
    0,
    gathers_in_8_bits=True,
    casts_once=True,
    keeps="in_8_bits",
    experts=True,
    shares_scales=False,
)
"""Activations and gradients are cast once by a fused kernel, which also writes the transpose for the weight gradient. One product makes queries, keys and
values, and one gate and up."""

_torchao = partial(Fp8Recipe, gathers_in_8_bits=False, experts=False, shares_scales=True)
EAGER_TORCHAO_FP8 = _torchao((33, 33), (33, 29), (2, 29), 9, casts_once=False, keeps="in_16_bits")
"""torchao's casts, kernel by kernel: |x| and its maximum move 6 bytes per 16-bit element; conversion to fp32, scaling, clamping and rounding
27; a transpose of 8 bits 2. Scales are found once; casts of the input and the weight are done again in backward
(runtime/compute/fp8_product.py). Two fp32 copies and the result lie in memory at once."""
FUSED_TORCHAO_FP8 = _torchao((5, 5), (6, 4), (0, 4), 2, casts_once=True, keeps="made_again")
"""The same if a compiler makes one kernel for the maximum and one for the cast with its transpose. It computes cast inputs again rather than
keep them: on an H100 a LLaMA block keeps neither the results of its norms nor that of its activation (torch 2.11, torchao 0.18). What is computed twice
from the same tensor it computes once (torch 2.13, _functorch/partitioners.py, fx_graph_cse)."""


def with_gathers_in_8_bits(recipe: Fp8Recipe, *, sharded: bool) -> Fp8Recipe:
    """torchao's recipe where inputs are cast before they are gathered (float8_tensor_parallel.py, PrepareFloat8ModuleInput), and, if ``sharded``, weights too
    (``enable_fsdp_float8_all_gather``): a gathered weight is only transposed for the gradient of a layer's input, which moves 2 bytes an element."""
    (of_input, _), (of_gradient, _) = recipe.forward_cast_bytes, recipe.input_gradient_cast_bytes
    weights = {"forward_cast_bytes": (of_input, 0), "input_gradient_cast_bytes": (of_gradient, 2)} if sharded else {}
    return replace(recipe, gathers_in_8_bits=True, casts_own_part=True, **weights)


EAGER_TORCHAO_OPERATORS, FUSED_TORCHAO_OPERATORS = 336, 70
"""Operators besides the products, forward and backward, of a block with seven products: 48 and about 10 for each (counted on torchao 0.18)."""
