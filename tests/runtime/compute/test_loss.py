"""The loss, whole and split by vocabulary, against torch's cross_entropy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ahp.engines.registry import get
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.runtime.compute.loss import count_scored, shifted
from tests.runtime.allocated import most_allocated_bytes
from tests.runtime.workers import Pool


def test_shifted_scores_the_next_token() -> None:
    labels = torch.tensor([[5, 6, -100, 8]])
    assert shifted(labels).tolist() == [[6, -100, 8, -100]]
    assert count_scored(labels, causal=True).item() == 2
    assert count_scored(labels, causal=False).item() == 3


def split_loss(rank: int, world: int, scale: float) -> tuple[float, float]:
    from ahp.runtime.compute.loss import Loss, PendingCount

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 6, 32, generator=generator) * scale
    labels = torch.randint(0, 32, (4, 6), generator=generator)
    labels[0, :4] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole[:, :-1].reshape(-1, 32), labels[:, 1:].reshape(-1), ignore_index=-100)
    expected.backward()
    assert whole.grad is not None

    part = logits.chunk(world, -1)[rank].clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    loss = Loss(causal=True, vocabulary_group=group)
    loss.total = PendingCount(count_scored(labels, causal=True) if rank == 0 else torch.tensor(0), group)
    got = loss(part, labels)
    got.backward()
    assert part.grad is not None
    difference = (part.grad - whole.grad.chunk(world, -1)[rank]).abs().max().item()
    return abs(got.item() - expected.item()) / expected.item(), difference


def test_split_by_vocabulary_equals_whole(pool: Pool) -> None:
    for scale in (1.0, 100.0):  # large logits overflow unless the maximum over all ranks is taken off
        for error, gradient_error in pool.run(split_loss, 2, scale):
            assert error < 1e-6
            assert gradient_error < 1e-6


TOKENS, COLUMNS = 1024, 2048


def copies_at_the_peak(rank: int, world: int, engine: str) -> float:
    """Bytes that the loss of logits in bf16 and its backward pass allocate on one rank, over those of these logits in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    from ahp.runtime.compute.loss import Loss, PendingCount

    part = torch.randn(1, TOKENS, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, world * COLUMNS, (1, TOKENS))
    group = dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (world,))

    def of_ahp() -> None:
        loss = Loss(causal=True, vocabulary_group=group)
        loss.total = PendingCount(count_scored(labels, causal=True), group)
        loss(part, labels).backward()

    def of_torchtitan() -> None:
        logits = DTensor.from_local(part, mesh, [Shard(-1)], run_check=False)
        with loss_parallel():
            F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum").backward()

    work = {"ahp": of_ahp, "torchtitan": of_torchtitan}[engine]
    work()
    part.grad = None
    return most_allocated_bytes(work) / (TOKENS * COLUMNS * 4)


@pytest.mark.parametrize("engine", ["ahp", "torchtitan"])
def test_the_forecast_counts_the_copies_of_a_split_loss(pool: Pool, engine: str) -> None:
    layout = Parallelism(tensor_parallel_degree=2, data_parallel_shard_degree=1)
    copies = (
        get(engine)
        .traits(Job(precision="bf16"), layout, EngineChoice.model_validate({"name": engine}))
        .tensor.loss_copies
    )
    assert copies is not None
    for found in pool.run(copies_at_the_peak, 2, engine):
        assert found == pytest.approx(1 + copies, rel=0.02)
