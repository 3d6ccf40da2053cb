"""What of expert parallelism the host of a GPU would wait for: one copy a layer and forward pass, and nothing in backward. And what recompute
sends again.

On a CPU nothing waits. So operators are seen here whose result, or the size of it, the host needs before it goes on.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ahp.runtime.compute.recompute import computed, recompute
from ahp.runtime.experts import dispatch
from ahp.runtime.experts.balance_loss import Balance
from tests.runtime.experts.test_dispatch import Experts

aten = torch.ops.aten
WAITS = {aten.bincount, aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.equal}
LAYERS, TOKENS, WIDTH = 2, 12, 8


class Waits(TorchDispatchMode):
    """Names of the operators that let the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = func.overloadpacket
        unsized = operator is aten.repeat_interleave and kwargs.get("output_size") is None
        by_mask = operator in (aten.index, aten.index_put) and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if operator in WAITS or unsized or by_mask:
            self.found[str(operator)] += 1
        return func(*args, **kwargs)


@contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, which = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, which, share=share)


def divided(
    group: dist.ProcessGroup, kind: Literal["full", "selective"] | None, build: type[Block] = Block
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(build() for _ in range(LAYERS)))
    for block in model:
        assert isinstance(block, Block)
        block.experts.forward = dispatch.DividedExperts(block.experts, 4, group)  # type: ignore[method-assign]
        if kind is not None:
            recompute(block, kind)
    return model


@pytest.mark.parametrize("kind", [None, "full", "selective"])
def test_the_host_waits_once_a_layer(kind: Literal["full", "selective"] | None) -> None:
    with group_of_one() as group, mock.patch.object(dispatch, "Traffic", wraps=dispatch.Traffic) as traffic:
        model, x = divided(group, kind), torch.randn(TOKENS, WIDTH)
        with Waits() as waits:
            loss = model(x).square().sum()
            loss.backward()
    assert not waits.found
    assert traffic.call_count == LAYERS


def test_recompute_changes_nothing() -> None:
    x = torch.randn(TOKENS, WIDTH)

    def gradients(kind: Literal["full", "selective"] | None) -> list[torch.Tensor]:
        model = divided(group, kind)
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    with group_of_one() as group:
        plain = gradients(None)
        assert len(plain) == 5 * LAYERS
        for kind in ("full", "selective"):
            for a, b in zip(gradients(kind), plain, strict=True):
                assert torch.equal(a, b)


def test_routers_are_counted_without_waiting() -> None:
    balance, logits = Balance(0.1, 5, 2), torch.randn(TOKENS, 5)
    with Waits() as waits:
        counts, _ = balance.sums(logits)
    assert not waits.found
    assert counts.tolist() == torch.bincount(logits.topk(2).indices.flatten(), minlength=5).tolist()


def test_what_waits_is_seen() -> None:
    with Waits() as waits:
        ones = torch.ones(3, dtype=torch.int64)
        ones.bincount()
        ones.repeat_interleave(ones)
        ones.sum().item()
        ones[ones == 1]
    assert len(waits.found) == 4


class NormedAfter(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(super().forward(x), (WIDTH,))


@pytest.mark.parametrize(
    ("kind", "block", "again"),
    [
        (None, Block, 0),
        ("full", Block, 2),
        ("full", NormedAfter, 3),
        ("selective", Block, 0),
        ("selective", NormedAfter, 0),
    ],
)
def test_recompute_sends_again_what_it_needs(
    kind: Literal["full", "selective"] | None, block: type[Block], again: int
) -> None:
    """A layer sends numbers of tokens, tokens, their weights and results; backward their gradients. Full recompute knows the numbers, and needs
    results only for what is computed from them."""
    send = dist.all_to_all_single
    with group_of_one() as group, mock.patch.object(dist, "all_to_all_single", wraps=send) as sent:
        divided(group, kind, block)(torch.randn(TOKENS, WIDTH, requires_grad=True)).square().sum().backward()
    assert sent.call_count == (4 + 3 + again) * LAYERS


@pytest.mark.slow
def test_selective_recompute_keeps_what_arrived_and_one_sum_for_each_token() -> None:
    def kept() -> int:
        # gloo's thread lets go of what it sent a moment later, now and then after the profile or in the next one.
        before, now = kept_once(), kept_once()
        while before != now:
            before, now = now, kept_once()
        return now

    def kept_once() -> int:
        model, x = divided(group, "selective"), torch.randn(TOKENS, WIDTH)
        gc.collect()  # what earlier models left, so that it is not freed in between
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            y = model(x)
        assert y.requires_grad
        return sum(event.self_cpu_memory_usage for event in run.key_averages())

    with group_of_one() as group:
        kept_once()  # the first run of a process allocates what stays
        with mock.patch.object(dispatch, "saved_once", computed):
            sends_again = kept()
        rows = 2 * TOKENS * (WIDTH + 1) + TOKENS * WIDTH  # two copies of each token, with their weights
        assert kept() - sends_again == LAYERS * rows * 4
