"""A stage has memory for a message only from when it is asked for until it is read, and computes what one process does."""

from __future__ import annotations

import weakref
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


def test_the_last_stage_drops_its_logits_before_the_backward_pass(
    pool: Pool, plain_run: Callable[..., dict[str, Any]]
) -> None:
    results = pool.run(train_and_look_for_logits, 2)
    assert_same_curve(results[0], plain_run("llama", FEWER_STEPS))
    assert results[0]["held"] == []
    assert results[1]["held"] == [False] * len(results[1]["held"])
    assert len(results[1]["held"]) >= FEWER_STEPS


def train_and_look_for_logits(rank: int, world: int) -> dict[str, Any]:
    """Runs in each worker; ``held``: of each backward pass of the last stage, whether the logits are still there when it begins."""
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.pipeline import schedules

    held: list[bool] = []
    usual = schedules.forget_logits

    def watched(stage: Any) -> None:
        usual(stage)
        forward, backward, logits = stage.forward_one_chunk, stage.backward_one_chunk, {}

        def run_forward(micro_batch: int, *args: Any, **settings: Any) -> Any:
            output = forward(micro_batch, *args, **settings)
            logits[micro_batch] = weakref.ref(output)
            return output

        def run_backward(micro_batch: int, *args: Any, **settings: Any) -> Any:
            held.append(logits[micro_batch]() is not None)
            return backward(micro_batch, *args, **settings)

        stage.forward_one_chunk, stage.backward_one_chunk = run_forward, run_backward

    with mock.patch.object(schedules, "forget_logits", watched):
        parallel = parallelize(BUILDERS["llama"](), {"job": JOB, "parallelism": LAYOUTS["1f1b"]})
        results = [parallel.step(parallel.shard(batch(step))) for step in range(FEWER_STEPS)]
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "held": held}
