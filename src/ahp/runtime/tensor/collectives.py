"""Collectives that autograd passes through, for tensor parallelism: each with its transpose in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ahp.runtime.compute.recompute import How, computed
from ahp.runtime.torch_compat import gather_rows, scatter_sum
from ahp.search.slicing.conversion import Step
from ahp.search.slicing.placement import Split

TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class _SumGradient(torch.autograd.Function):
    """The identity; in backward the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _unlike_a_view(x)

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
    """The whole of a split tensor; in backward this rank's part of a gradient that is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.split, ctx.group = split, group
        return _gathered(x, split, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        split, group = ctx.split, ctx.group
        return cut_segments(gradients[0], split.dim, split.segments, group.size(), group.rank()), None, None


class _GatherAndSumGradient(torch.autograd.Function):
    """The whole of a split tensor, for work that the ranks share: in backward this rank's part of the sum of gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.split, ctx.group = split, group
        return _gathered(x, split, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _part_of_sum(gradients[0], ctx.split, ctx.group), None, None


class _SumAndCut(torch.autograd.Function):
    """This rank's part of the sum over ranks; in backward the whole gradient from its parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.split, ctx.group = split, group
        return _part_of_sum(x, split, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradients[0], ctx.split, ctx.group), None, None


class _Cut(torch.autograd.Function):
    """This rank's part of a whole tensor; in backward the whole gradient from its parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.split, ctx.group = split, group
        return _unlike_a_view(cut_segments(x, split.dim, split.segments, group.size(), group.rank()))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradients[0], ctx.split, ctx.group), None, None


def _unlike_a_view(x: torch.Tensor) -> torch.Tensor:
    """The same memory, but no view for autograd. Where a compiled graph breaks, as it does at divided experts, torch makes each view again
    from its base, without the backward of the function that returned it."""
    return torch.ops.aten._unsafe_view(x, x.shape)


def _gathered(x: torch.Tensor, split: Split, group: dist.ProcessGroup) -> torch.Tensor:
    rows = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    gather_rows(rows, x.contiguous(), group=group)
    return join_rows(rows, split, group.size())


def _part_of_sum(x: torch.Tensor, split: Split, group: dist.ProcessGroup) -> torch.Tensor:
    rows = cut_rows(x, split, group.size())
    part = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    scatter_sum(part, rows, group=group)
    return part


def cut_rows(whole: torch.Tensor, split: Split, degree: int) -> torch.Tensor:
    """The parts of all ranks, joined along dim 0 as collectives take them: copied once, or not at all if memory has this order already
    (a split of dim 0, or of dim 1 of a batch of one)."""
    dim = split.dim
    if len(split.segments) > 1:
        before, after = whole.shape[:dim], whole.shape[dim + 1 :]
        segments = zip(whole.split(split.segments, dim), split.segments, strict=True)
        shares = [x.view(*before, degree, size // degree, *after).movedim(dim, 0) for x, size in segments]
        return torch.cat(shares, dim + 1).flatten(0, 1)
    if whole.shape[:dim].numel() > 1:
        return torch.cat(whole.chunk(degree, dim))
    part = [size // degree if i == dim else size for i, size in enumerate(whole.shape)]
    return whole.contiguous().view(degree * part[0], *part[1:])


def join_rows(rows: torch.Tensor, split: Split, degree: int) -> torch.Tensor:
    """The inverse of ``cut_rows``; it copies no more."""
    dim = split.dim
    if len(split.segments) > 1:
        return join_segments(list(rows.chunk(degree)), dim, split.segments)
    part = (rows.shape[0] // degree, *rows.shape[1:])
    if part[:dim] != (1,) * dim:
        return torch.cat(rows.chunk(degree), dim)
    return rows.view([size * degree if i == dim else size for i, size in enumerate(part)])


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
    """A whole tensor that enters work shared by the ranks; backward adds up their gradients."""
    return _SumGradient.apply(x, group)  # type: ignore[no-any-return]


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the ranks' partial sums."""
    return _Sum.apply(x, group)  # type: ignore[no-any-return]


def cut_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of hidden states [batch, sequence, ...] that every rank holds whole; backward gathers the whole gradient."""
    return _Cut.apply(x, Split(1, (x.shape[1],)), group)  # type: ignore[no-any-return]


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of ``cut_sequence``; every rank must do the same with the result."""
    return _Gather.apply(x, Split(1, (x.shape[1] * group.size(),)), group)  # type: ignore[no-any-return]


def gather_shared(x: torch.Tensor, split: Split, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of a split tensor, for work that the ranks share; backward gives each rank its part of the sum of their gradients."""
    return _GatherAndSumGradient.apply(x, split, group)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: ``sent[r]`` of each tensor's rows go to rank ``r``, ``received[r]`` come from it; in backward the
    gradients go back. Several tensors in one node of the graph, so that every rank sends them in the same order."""

    @staticmethod
    def forward(
        ctx: Any, sent: list[int], received: list[int], group: dist.ProcessGroup, how: How, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return how(lambda: tuple(exchanged(x, sent, received, group) for x in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4:]
        back = (
            exchanged(g, ctx.received, ctx.sent, ctx.group) if needed else None
            for g, needed in zip(gradients, wanted, strict=True)
        )
        return None, None, None, None, *back


def exchanged(x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of ``x`` that each rank of a group sent here, in the order of the ranks; autograd does not see it."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def exchange_rows(
    tensors: tuple[torch.Tensor, ...],
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    how: How = computed,
) -> tuple[torch.Tensor, ...]:
    """Exchange rows with the ranks of a group, in the order of the ranks. ``sent``, ``received``: number of rows for each rank; ``how``:
    ``saved_once`` where selective recompute keeps what arrives."""
    return _Exchange.apply(sent, received, group, how, *tensors)  # type: ignore[no-any-return]


def step_function(step: Step, group: dist.ProcessGroup) -> TensorFunction:
    """The collective of one step of a conversion, as a function of only the tensor."""
    if step.kind == "sum":
        return lambda x: sum_over_ranks(x, group)
    if step.kind == "sum_gradient":
        return lambda x: sum_gradient(x, group)
    function = {
        "gather": _Gather,
        "gather_and_sum_gradient": _GatherAndSumGradient,
        "sum_and_cut": _SumAndCut,
        "cut": _Cut,
    }[step.kind]
    return lambda x: function.apply(x, step.split, group)  # type: ignore[no-any-return]
