"""A stage has memory for a message only from when it is asked for until it is read, and computes what one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

from ahp.schedule import messages
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import FEWER_STEPS, assert_same_curve, world_size
from tests.runtime.workers import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline_parallel_degree": 2, "micro_batch_size": 1},
    "v": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "ZBVZeroBubble",
        "virtual_stages_per_rank": 2,
        "micro_batch_size": 1,
    },
    "loops": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "virtual_stages_per_rank": 2,
        "micro_batch_size": 1,
    },
}


@pytest.mark.parametrize("layout", cases(LAYOUTS, fast={"1f1b"}))
def test_messages_have_memory_while_they_wait(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str
) -> None:
    keys = LAYOUTS[layout]
    results = pool.run(train, world_size(keys), "llama", keys)
    assert_same_curve(results[0], plain_run("llama", FEWER_STEPS))
    for result in results:
        assert 0 < max(result["waiting"]) <= 3, "the memory of eight micro-batches' messages"
        assert result["left"] == 0


def train(rank: int, world: int, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Runs in each worker, with receives among the computations as on GPUs."""
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.pipeline import schedules

    counts: list[int] = []
    made: list[Any] = []
    usual = schedules.receive_in_turn

    def counted(stage: Any) -> None:
        usual(stage)
        made.append(stage)
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, partial(run, getattr(stage, name)))

    def run(compute: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        counts.append(num_held(made))
        return compute(*args, **settings)

    def in_turn(order: Any, *, receives_first: bool) -> Any:
        return messages.with_messages(order)

    with (
        mock.patch.object(schedules, "receive_in_turn", counted),
        mock.patch.object(schedules, "with_messages", in_turn),
    ):
        parallel = parallelize(BUILDERS[model](), {"job": JOB, "parallelism": layout})
        results = [parallel.step(parallel.shard(batch(step))) for step in range(FEWER_STEPS)]
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "waiting": counts,
        "left": num_held(made),
    }


def num_held(stages: list[Any]) -> int:
    """Messages that torch's stages have memory for."""
    each = [
        *(one for stage in stages for table in (stage.args_recv_info, stage.grad_recv_info) for one in table.values())
    ]
    buffers = [getattr(message, "buffer", None) for messages_of in each for message in messages_of]
    return sum(one is not None and one.device.type != "meta" for one in buffers)
