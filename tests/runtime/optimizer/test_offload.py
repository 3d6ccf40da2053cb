"""AdamW's moments in host memory: the very same steps, a bucket on the device at a time, and checkpoints that any plan loads.

On a CPU host and device are one memory; the moments go the whole way all the same, as copies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ahp.errors import HardwareMismatch
from ahp.runtime.optimizer.offload import MOMENTS, HostMoments, refuse_without_host
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import assert_same_curve, world_size
from tests.runtime.weights.test_checkpoint import PLANS
from tests.runtime.workers import Pool

STEPS = 4


def adamw() -> torch.optim.AdamW:
    torch.manual_seed(0)
    decayed, other = ([torch.nn.Parameter(torch.randn(n, 3)) for n in sizes] for sizes in ((5, 1, 7), (2,)))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, fused=True)


def test_steps_are_those_of_adamw_to_the_last_bit_a_bucket_at_a_time() -> None:
    plain, kept = adamw(), adamw()
    host = HostMoments(kept, bucket_bytes=5 * 3 * 4 * 2)  # one of 5 rows; one of 1; one of 7 alone; the last
    assert [[len(shard) for shard in bucket] for bucket in host.buckets] == [[5], [1], [7], [2]]
    at_home = {shard: kept.state[shard]["exp_avg"].data_ptr() for bucket in host.buckets for shard in bucket}
    taken: list[int] = []

    def step() -> None:
        away = [shard for shard in at_home if kept.state[shard]["exp_avg"].data_ptr() != at_home[shard]]
        taken.append(len(away))
        torch.optim.AdamW.step(kept)

    with mock.patch.object(kept, "step", step):
        for number in range(3):
            for optimizer in (plain, kept):
                torch.manual_seed(number)
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = torch.randn_like(p) if len(p) != 7 or number != 1 else None
            plain.step()
            host.step()
    assert taken == [1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    for one, other in zip(plain.param_groups, kept.param_groups, strict=True):
        for a, b in zip(one["params"], other["params"], strict=True):
            assert torch.equal(a, b)
            assert b.grad is None
            for key in (*MOMENTS, "step"):
                assert torch.equal(plain.state[a][key], kept.state[b][key])
            assert kept.state[b]["exp_avg"].data_ptr() == at_home[b], "the moments are not back"


def train(
    rank: int,
    world: int,
    layout: dict[str, Any],
    first: int,
    last: int,
    load: str | None,
    save: str | None,
    offload: bool,
) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    with mock.patch("ahp.runtime.limits.refuse_without_host"):
        plan = {"job": JOB, "parallelism": layout, "engine": {"offload_optimizer": offload}}
        parallel = parallelize(BUILDERS["gpt2"](), plan)
    if load is not None:
        parallel.load(load)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(first, last)]
    if save is not None:
        parallel.save(save)
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param("one", "tp", marks=pytest.mark.slow),
        pytest.param("zero3-x-tp", "zero1", marks=pytest.mark.slow),
        pytest.param("1f1b", "zero3", marks=pytest.mark.slow),
    ],
)
def test_a_run_equals_one_process_across_a_checkpoint(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], tmp_path: Path, saved: str, loaded: str
) -> None:
    """The moments go out of host memory under one plan and into it under another, which keeps them on the device before."""
    folder, middle = str(tmp_path / "checkpoint"), STEPS // 2
    before = pool.run(train, world_size(PLANS[saved]), PLANS[saved], 0, middle, None, folder, True)[0]
    after = pool.run(train, world_size(PLANS[loaded]), PLANS[loaded], middle, STEPS, folder, None, loaded != "zero1")[0]
    assert_same_curve({key: before[key] + after[key] for key in before}, plain_run("gpt2", STEPS))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(HardwareMismatch, match=r"engine.offload_optimizer = True: on a CPU.*valid: False"):
        refuse_without_host(torch.device("cpu"))
    refuse_without_host(torch.device("cuda"))
