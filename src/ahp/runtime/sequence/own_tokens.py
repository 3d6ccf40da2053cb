"""Runs blocks on parts of the sequence: what each rank of the context axis gets, and how its attention sees the rest.

The model's own forward makes embeddings, masks and rotary tables of whole sequences on every rank. The first block takes this
rank's tokens of the hidden states, which stay cut from there to the loss. Every block takes this rank's tokens of rotary
tables and of other per-token tensors; masks stay whole. No gradient is gathered for this: each rank has the gradient of its
own tokens, and the sums over data-parallel ranks include the context ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ahp.errors import BadInput, bad_input
from ahp.forecast import rules
from ahp.graph.call import Documents
from ahp.graph.capture import Capture, capture
from ahp.graph.copies import fake_copy
from ahp.graph.outline import Outline, block_input, outline
from ahp.graph.torch_compat import backward_number
from ahp.job import Job
from ahp.plan import ContextMethod, Parallelism, Plan
from ahp.runtime.pipeline.cut import cut
from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.sequence.context import Context
from ahp.runtime.sequence.ulysses import InContext
from ahp.runtime.shard.fsdp import COMPUTE_DTYPE
from ahp.runtime.torch_compat import FakeTensorMode, pytree
from ahp.search.slicing.aliases import writes
from ahp.search.slicing.token_parts import (
    ATTENTION,
    BATCH,
    Attention,
    TokenParts,
    check_numbers,
    check_tokens_apart,
    token_parts,
    traced_length,
)


class SequenceSharding:
    """How a model runs on parts of its sequences. Raises BadInput when it cannot."""

    def __init__(self, module: nn.Module, found: Outline, plan: Plan, mesh: Mesh, documents: Documents | None) -> None:
        """``found``: the model's outline for sequences of the job's length; ``documents``: as given to that outline."""
        degree = plan.parallelism.context_parallel_degree
        self.found = found
        if found.reads_beside:
            rule = f"the model computes with what {found.blocks_path} return beside their hidden states, of which a rank has a part"
            raise bad_input("context_parallel_degree", degree, rule, [1])
        there = any(isinstance(part, nn.MultiheadAttention) for part in module.modules())
        if reason := rules.attention_module(there, plan.parallelism, plan.engine):
            raise BadInput(reason)
        try:
            self.parts = _parts_of_kinds(module, found, plan.job, documents)
        except BadInput as reason:
            raise bad_input("context_parallel_degree", degree, str(reason), [1]) from None
        method = _method(plan.parallelism, [parts.attention for parts in self.parts])
        self.context = Context(mesh.group("cp"), method)

    def attend(self, block: nn.Module) -> None:
        """Make the block's attention see the whole sequence, in place. To be called before it is made to recompute."""
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with InContext(self.context):
                return forward(*args, **kwargs)

        block.forward = run  # type: ignore[method-assign]

    def take_own_tokens(self, block: nn.Module, number: int, after_blocks: ExitStack) -> None:
        """Make the block, in place, take this rank's part of its inputs; only block 0 gets whole hidden states.

        To be called after it is made to recompute, so that recompute keeps the parts. ``after_blocks``: of the block's stage.
        """
        parts = self.parts[self.found.kinds[number]]
        rest = after_blocks if number == self.found.num_layers - 1 else None
        block.forward = TakeOwnTokens(block.forward, self.context, parts, first=number == 0, rest=rest)  # type: ignore[method-assign]


class TakeOwnTokens:
    def __init__(
        self, forward: Callable[..., Any], context: Context, parts: TokenParts, *, first: bool, rest: ExitStack | None
    ) -> None:
        """``rest``: for the last block, the contexts that the forward after it runs in."""
        self.forward, self.context, self.parts, self.first, self.rest = forward, context, parts, first, rest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = block_input(args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = {i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        if tensors - self.parts.dims.keys():  # can be fewer: rows of one document each need no document mask
            rule = f"a block is given {len(tensors)} tensors, and others on tensors without data"
            raise bad_input("context_parallel_degree", self.context.size, rule, [1])
        for i in tensors:
            dim = self.parts.dims[i]
            if dim is not None and (self.first or leaves[i] is not hidden):
                leaves[i] = self.context.own(leaves[i], dim).contiguous()
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        out = self.forward(*args, **kwargs)
        if (
            self.rest is not None and backward_number() == -1
        ):  # not where the model's own checkpoint runs the block again
            self.rest.enter_context(ShapedByOwnTokens(out[0] if isinstance(out, tuple) else out, self.context.size))
        return out


class ShapedByOwnTokens(TorchFunctionMode):
    """Within, a tensor that the model reshapes to the shape of its input (GPT-2's last ``view``) keeps this rank's number of tokens."""

    def __init__(self, hidden: torch.Tensor, ranks: int) -> None:
        super().__init__()
        self.tokens = hidden.shape[1]
        self.whole = self.tokens * ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.view, torch.Tensor.reshape) and len(args) > 1:
            size = tuple(args[1]) if isinstance(args[1], (tuple, list)) else args[1:]
            return func(args[0], self._of_own_tokens(args[0], size))
        if func is torch.Tensor.unflatten and args[1:2] == (0,):
            return func(args[0], 0, self._of_own_tokens(args[0], tuple(args[2])))
        return func(*args, **(kwargs or {}))

    def _of_own_tokens(self, x: torch.Tensor, size: tuple[Any, ...]) -> tuple[Any, ...]:
        """A size for whole sequences with this rank's number of tokens, if ``x`` holds no more: [batch, sequence, ..], or all tokens in a row.
        ``size`` may have a -1, which would take the missing tokens out of another dim."""
        tokens, whole = self.tokens, self.whole
        apart = x.shape[1:2] == (tokens,)
        if apart and size[:1] == (x.shape[0] * whole,):
            return (x.shape[0] * tokens, *size[1:])
        if size[1:2] != (whole,):
            return size
        own = (apart and size[0] in (-1, x.shape[0])) or x.shape[:1] == (size[0] * tokens,)
        exact = -1 not in size and math.prod(size) == x.numel() * whole // tokens
        return (size[0], tokens, *size[2:]) if own or exact else size


def _parts_of_kinds(module: nn.Module, found: Outline, job: Job, documents: Documents | None) -> tuple[TokenParts, ...]:
    """The token parts of each kind of block. Raises BadInput also if what runs after the blocks mixes tokens."""
    lengths = check_after_blocks(module, found, job)
    blocks, others = (
        outline(
            module, batch_size=BATCH, sequence_length=n, dtype=COMPUTE_DTYPE[job.precision], documents=documents
        ).captures
        for n in lengths
    )
    kinds = tuple(token_parts(block, lengths[0]) for block in blocks)
    for one, other in zip(blocks, others, strict=True):
        check_numbers(one, other)
    return kinds


def check_after_blocks(module: nn.Module, found: Outline, job: Job) -> tuple[int, int]:
    """Raises BadInput if what runs after the blocks mixes tokens. Returns the two sequence lengths that it was traced with."""
    sizes = {size for tensor in [*module.parameters(), *module.buffers()] for size in tensor.shape}
    length = traced_length(sizes, job.sequence_length)
    shorter = traced_length(sizes, length - 1)
    after = _after_blocks(module, found, length, COMPUTE_DTYPE[job.precision])
    check_tokens_apart(after, (1, None), length)
    if any(node.target is ATTENTION for node in after.nodes):
        raise BadInput(f"attention runs after {found.blocks_path}, where it would see a part of the tokens alone")
    check_numbers(after, _after_blocks(module, found, shorter, COMPUTE_DTYPE[job.precision]))
    return length, shorter


def _after_blocks(module: nn.Module, found: Outline, length: int, dtype: torch.dtype) -> Capture:
    """The graph of what runs after the blocks, for sequences of ``length``."""
    num_layers = found.num_layers
    with FakeTensorMode(allow_non_fake_inputs=True):
        end = cut(fake_copy(module, dtype), replace(found, before=()), range(num_layers, num_layers), dtype)
        hidden = torch.empty((BATCH, length, *found.hidden.shape[2:]), dtype=found.hidden.dtype)
        ids = torch.empty(BATCH, length, dtype=torch.int64)
    captured = capture(end, (hidden,), {"input_ids": ids})
    # What it computed for the blocks: torch takes operators that may draw numbers, as attention, for ones with effects.
    captured.graph.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or writes(node))
    return captured


def _method(p: Parallelism, attentions: list[Attention]) -> ContextMethod:
    """The method that was asked for. If none was: all-to-all, which runs the kernels of one device, if the ranks divide the heads, else ring.
    One method for all stages, because it decides which tokens a rank has. Raises BadInput if that method cannot run."""
    context, key = p.context_parallel_degree, "context_parallel_method"
    tensor = math.lcm(*(tensor for _, tensor in p.widths))
    heads = sorted({count for attention in attentions for count in attention.heads})
    undivided = next((count for count in heads if count % (tensor * context)), None)
    if p.context_parallel_method == "all-to-all" or (p.context_parallel_method is None and undivided is None):
        if undivided is not None:
            rule = f"context_parallel_degree {context} x tensor_parallel_degree {tensor} does not divide {undivided} attention heads"
            raise bad_input(key, "all-to-all", rule, ["ring"])
        return "all-to-all"
    shown = (
        p.context_parallel_method
        or f"null (ring, because {context} x {tensor} ranks do not divide {undivided} attention heads)"
    )
    if any(attention.drops for attention in attentions):
        raise bad_input(key, shown, "attention with dropout cannot go round a ring", ["all-to-all"])
    if any(attention.trainable_mask for attention in attentions):
        raise bad_input(
            key,
            shown,
            "attention adds a trainable tensor to its products, which cannot go round a ring",
            ["all-to-all"],
        )
    return "ring"
