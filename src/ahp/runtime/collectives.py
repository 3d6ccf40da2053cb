"""Collectives that autograd passes through, for tensor parallelism: each with its transpose in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class _SumGradient(torch.autograd.Function):
    """The identity; in backward the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """The sum over ranks; in backward the identity, because every rank holds the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """The whole of a tensor that is split along ``dim``, segment by segment; in backward this rank's part."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, segments: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.dim, ctx.segments, ctx.group = dim, segments, group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return join_segments(parts, dim, segments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return cut_segments(gradients[0], ctx.dim, ctx.segments, ctx.group.size(), ctx.group.rank()), None, None, None


def cut_segments(whole: torch.Tensor, dim: int, segments: tuple[int, ...], degree: int, rank: int) -> torch.Tensor:
    """The part of rank ``rank``: its share of each segment, one after the other; contiguous."""
    pieces = [segment.chunk(degree, dim)[rank] for segment in whole.split(segments, dim)]
    return (torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]).contiguous()


def join_segments(parts: list[torch.Tensor], dim: int, segments: tuple[int, ...]) -> torch.Tensor:
    """The inverse of ``cut_segments``, from the parts of all ranks in order."""
    shares = [s // len(parts) for s in segments]
    pieces = [part.split(shares, dim) for part in parts]
    return torch.cat([pieces[rank][i] for i in range(len(segments)) for rank in range(len(parts))], dim)


def sum_gradient(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A whole tensor on its way into work that each rank does a part of."""
    return _SumGradient.apply(x, group)  # type: ignore[no-any-return]


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of a partial sum."""
    return _Sum.apply(x, group)  # type: ignore[no-any-return]


def gather(x: torch.Tensor, dim: int, segments: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of a split tensor."""
    return _Gather.apply(x, dim, segments, group)  # type: ignore[no-any-return]
