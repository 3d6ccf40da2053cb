"""Divided experts on a GPU: the same numbers as whole ones, and a host that waits once a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ahp.runtime.experts import dispatch
from ahp.runtime.experts.balance_loss import Balance
from tests.runtime.experts.test_host_waits import LAYERS, TOKENS, WIDTH, divided

KINDS: tuple[Literal["full", "selective"] | None, ...] = (None, "full", "selective")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within, torch raises where the host would wait for the device, but for events."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_waits_once_a_layer(kind: Literal["full", "selective"] | None, alone: torch.device) -> None:
    """For the event behind the one copy to pinned memory, which is not an error here."""
    assert dist.group.WORLD is not None
    model, x = divided(dist.group.WORLD, kind).to(alone), torch.randn(TOKENS, WIDTH, device=alone)
    model(x).sum().backward()  # NCCL starts at its first collective, torch at the first use of each kernel
    waited = mock.Mock(wraps=torch.cuda.Event.synchronize)
    with mock.patch.object(torch.cuda.Event, "synchronize", lambda event: waited(event)), no_waiting():
        model(x).sum().backward()
    assert waited.call_count == LAYERS


@pytest.mark.parametrize("kind", KINDS)
def test_divided_experts_equal_whole_ones(kind: Literal["full", "selective"] | None, alone: torch.device) -> None:
    assert dist.group.WORLD is not None
    x = torch.randn(TOKENS, WIDTH, device=alone)
    models = [divided(dist.group.WORLD, how).to(alone) for how in (None, kind)]
    for block in models[0]:
        experts = block.experts
        assert isinstance(experts.forward, dispatch.DividedExperts)
        experts.forward = experts.forward.forward
    outputs = [model(x) for model in models]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_routers_are_counted_without_waiting(device: torch.device) -> None:
    balance, logits = Balance(0.1, 5, 2), torch.randn(TOKENS, 5, device=device)
    balance.sums(logits)
    with no_waiting():
        found = balance.sums(logits)
    torch.testing.assert_close(found.cpu(), balance.sums(logits.cpu()))
