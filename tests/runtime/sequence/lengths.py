"""Attention of sequences of several lengths on a CPU, in the place of FlashAttention's kernel: document by document, written out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from ahp.engines.ahp import needs_masks
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.runtime.sequence import document_attention

ALL = -1
"""How far a token sees that sees all."""


class Counted:
    """Calls of the kernel since ``on_cpu`` was last entered. Counted where no compiler sees it, for a graph would be made anew for each."""

    calls = 0


def weights(q: torch.Tensor, k: torch.Tensor, before: int, after: int, scale: float) -> torch.Tensor:
    """Of the tokens of one document, q and k [H, tokens, D]: what each sees of each other, [H, tokens, tokens]."""
    order = torch.arange(q.shape[1], device=q.device)
    ahead = order - order[:, None]
    seen = ((ahead >= -before) | (before == ALL)) & ((ahead <= after) | (after == ALL))
    return (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")).softmax(-1)


def heads_of(start: int, end: int, times: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Of each tensor [tokens, H or G, D] those of a document, in fp32, as [H, tokens, D]."""
    own = [x[start:end].transpose(0, 1).float() for x in tensors]
    return [own[0], *(x.repeat_interleave(times, 0) for x in own[1:])]


@torch.library.custom_op("ahp_tests::attention_of_lengths", mutates_args=())
def operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    before: int,
    after: int,
    scale: float | None,
) -> torch.Tensor:
    """q [tokens, H, D], k and v [tokens, G, D] -> [tokens, H, D]; documents are from ``bounds[i]`` to ``bounds[i + 1]``."""
    assert int(bounds[-1]) == len(q), "documents that there is no room for"
    Counted.calls += 1
    found, factor = [], q.shape[-1] ** -0.5 if scale is None else scale
    for start, end in bounds.unfold(0, 2, 1).tolist():
        queries, keys, values = heads_of(start, end, q.shape[1] // k.shape[1], q, k, v)
        found.append((weights(queries, keys, before, after, factor) @ values).transpose(0, 1))
    return torch.cat(found).to(q.dtype)


@torch.library.custom_op("ahp_tests::attention_of_lengths_backward", mutates_args=())
def operator_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    before: int,
    after: int,
    scale: float | None,
) -> list[torch.Tensor]:
    found, factor = [], q.shape[-1] ** -0.5 if scale is None else scale
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    for start, end in bounds.unfold(0, 2, 1).tolist():
        queries, keys, values = heads_of(start, end, groups[1], q, k, v)
        (of_out,) = heads_of(start, end, 1, gradient)
        shares = weights(queries, keys, before, after, factor)
        of_shares = of_out @ values.transpose(1, 2)
        of_products = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * factor
        of_keys, of_values = of_products.transpose(1, 2) @ queries, shares.transpose(1, 2) @ of_out
        summed = [x.unflatten(0, groups).sum(1) for x in (of_keys, of_values)]
        found.append([x.transpose(0, 1) for x in (of_products @ keys, *summed)])
    return [torch.cat(parts).to(q.dtype) for parts in zip(*found, strict=True)]


@operator.register_fake
def _(q, k, v, bounds, before, after, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(q)


@operator_backward.register_fake
def _(gradient, q, k, v, bounds, before, after, scale):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x) for x in (q, k, v)]


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.before, ctx.after, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    return *operator_backward(gradient, *ctx.saved_tensors, ctx.before, ctx.after, ctx.scale), None, None, None, None


operator.register_autograd(_backward, setup_context=_keep)


@contextmanager
def on_cpu() -> Iterator[type[Counted]]:
    """Within, a CPU has the kernel, in fp32 too; all other rules hold."""
    Counted.calls = 0

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: torch.Tensor,
        longest: int,
        window: tuple[int | None, int | None],
        scale: float | None,
    ) -> torch.Tensor:
        before, after = (ALL if size is None else size for size in window)
        return operator(q, k, v, bounds, before, after, scale)

    def rules(job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        return needs_masks(job.model_copy(update={"precision": "bf16"}), parallelism, choice)

    with ExitStack() as stack:
        for name, value in (
            ("attention_of_lengths", kernel),
            ("needs_masks", rules),
            ("_needs_masks_on", lambda device: None),
        ):
            stack.enter_context(mock.patch.object(document_attention, name, value))
        yield Counted
