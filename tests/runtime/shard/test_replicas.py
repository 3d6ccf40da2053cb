"""Buckets of replicas: autograd's own addition fills them, so that no gradient is copied to be sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ahp.runtime.shard import replicas as replicas_module
from ahp.runtime.shard.replicas import Replicas


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def model() -> nn.Sequential:
    """A weight that is used twice, one that lies the other way round in memory, and one that is never used."""
    torch.manual_seed(0)
    tied = nn.Linear(8, 8)
    blocks = nn.Sequential(nn.Linear(8, 8), tied, nn.ReLU(), tied)
    blocks[0].weight = nn.Parameter(blocks[0].weight.detach().t())
    return blocks


def run(module: nn.Module, inputs: list[torch.Tensor], replicas: Replicas | None = None) -> None:
    for number, x in enumerate(inputs):
        if replicas is not None:
            replicas.armed = number == len(inputs) - 1
        module(x).square().sum().backward()


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_gradients_are_those_of_plain_autograd_and_parts_of_their_bucket(
    group: dist.ProcessGroup, num_micro_batches: int
) -> None:
    plain, own = model(), model()
    replicas = Replicas(group)
    replicas.watch([own[0], own])
    buckets = set()
    for _ in range(2):
        inputs = list(torch.randn(num_micro_batches, 4, 8))
        run(plain, inputs)
        with Operators() as operators:
            run(own, inputs, replicas)
        assert not operators.found[torch.ops.aten.cat]
        assert operators.found[torch.ops.aten.copy_] == 4, "the first of the step, each once"
        memory = [
            {p.grad.untyped_storage().data_ptr() for p in unit.parameters() if p.grad is not None} for unit in own
        ]
        assert [len(found) for found in memory] == [1, 1, 0, 1], "autograd keeps parts of the buckets"
        buckets.update(*memory)
        replicas.finish()
        for a, b in zip(plain.parameters(), own.parameters(), strict=True):
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)
            a.grad = b.grad = None
    assert len(buckets) == 1, "their memory stays"


def test_gradients_that_came_otherwise_are_collected(group: dist.ProcessGroup) -> None:
    """As a program's own, or those that a split backward makes later."""
    own, replicas = model(), Replicas(group)
    replicas.watch([own])
    for number in range(2):
        for parameter in own.parameters():
            parameter.grad = torch.full_like(parameter, number)
        replicas.finish()
        (flat,) = [bucket.flat for bucket in replicas.buckets]
        for parameter in own.parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.full_like(parameter, number))
            assert parameter.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            parameter.grad = None


@pytest.mark.parametrize(("limit_bytes", "sums"), [(200, [72, 64, 72]), (300, [136, 72]), (10_000, [208])])
def test_gradients_are_summed_together_until_they_fill_a_bucket(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, limit_bytes: int, sums: list[int]
) -> None:
    """The last layer's first, each sum while layers before it still compute."""
    monkeypatch.setattr(replicas_module, "REPLICA_BUCKET_BYTES", limit_bytes)
    own = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    replicas, begun = Replicas(group), []
    replicas.watch([own[2], own[1], own])
    monkeypatch.setattr(replicas, "start", lambda buffer: begun.append(buffer.numel()))
    run(own, [torch.randn(4, 8)], replicas)
    assert begun == sums


def test_a_parameter_without_a_gradient_is_told_and_sends_zeros(group: dist.ProcessGroup) -> None:
    own = model()
    own.register_parameter("unused", nn.Parameter(torch.ones(3)))
    replicas = Replicas(group)
    replicas.watch([own])
    for _ in range(2):
        x, plain = torch.randn(4, 8), model()
        run(plain, [x, x])
        run(own, [x, x], replicas)
        assert replicas.finish() == {id(own.unused)}
        gradients = {name: p.grad for name, p in own.named_parameters()}
        assert torch.equal(gradients.pop("unused"), torch.zeros(3))
        for name, p in plain.named_parameters():
            assert torch.equal(gradients[name], p.grad)
        own.zero_grad()


def test_a_gradient_that_is_asked_for_fills_no_bucket(group: dist.ProcessGroup) -> None:
    """As the loss in chunks asks for that of each chunk, in the forward pass of the last micro-batch."""
    own = model()
    replicas = Replicas(group)
    replicas.watch([own])
    replicas.armed = True
    weights = list(own.parameters())
    for _ in range(3):
        torch.autograd.grad(own(torch.randn(4, 8)).sum(), weights)
    assert [bucket.num_ready for bucket in replicas.buckets] == [0]
    assert not replicas.pending
