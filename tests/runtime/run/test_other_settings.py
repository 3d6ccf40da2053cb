"""A run that goes on with other settings of its optimizer, or in another precision, from its checkpoint (``run.extend``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ahp.runtime.parallel import Parallel, parallelize
from ahp.runtime.torch_compat import local_tensor
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, batch

OTHER = {"learning_rate": 3e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "grad_clip": 0.1}
HALF, STEPS = 2, 5


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(**changes: Any) -> Parallel:
    return parallelize(BUILDERS["llama"](), {"job": {**JOB, **changes}, "parallelism": {}})


def steps(parallel: Parallel, numbers: range) -> list[tuple[float, float]]:
    results = (parallel.step(parallel.shard(batch(number))) for number in numbers)
    return [(result.loss, result.grad_norm) for result in results]


def by_hand() -> list[tuple[float, float]]:
    """Plain PyTorch, where the settings are changed between two steps."""
    model = BUILDERS["llama"]()
    given = {key: OPTIMIZER[key] for key in ("betas", "eps", "weight_decay")}
    adamw = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER["learning_rate"], **given)
    clip, found = OPTIMIZER["grad_clip"], []
    for number in range(STEPS):
        if number == HALF:
            clip = OTHER["grad_clip"]
            for group in adamw.param_groups:
                group |= {key: OTHER[key] for key in given} | {"lr": OTHER["learning_rate"]}
        data = batch(number)
        logits = model(input_ids=data["input_ids"]).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits.float(), data["labels"][:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        adamw.step()
        adamw.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.slow
def test_the_steps_to_come_are_those_of_torch_with_the_new_settings(alone: None, tmp_path: Path) -> None:
    before = made()
    found = steps(before, range(HALF))
    before.save(tmp_path)
    after = made(optimizer={**OPTIMIZER, **OTHER})
    after.load(tmp_path)
    found += steps(after, range(HALF, STEPS))
    for ours, theirs in zip(found, by_hand(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    cases(
        [("fp16", "fp32"), ("fp16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")],
        fast=[("fp16", "fp32"), ("fp32", "bf16")],
    ),
)
def test_a_checkpoint_of_another_precision_is_read_whole(alone: None, tmp_path: Path, before: str, after: str) -> None:
    first, second = made(precision=before), made(precision=after)
    steps(first, range(1))
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.num_steps_done == 1
    for name, weight in first.state.parameters.items():
        assert torch.equal(local_tensor(second.state.parameters[name].detach()), local_tensor(weight.detach()))
        for key, moment in first.state.optimizer.moments(name).items():
            assert torch.equal(second.state.optimizer.moments(name)[key], moment), (name, key)
