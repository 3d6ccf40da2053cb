"""Any order of actions that can run does so on torch's pipeline runtime, and computes what one process does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from ahp.errors import BadInput
from ahp.plan import Parallelism
from ahp.schedule.orders import order_text
from ahp.schedule.simulate import StageTimes
from ahp.schedule.synthesis.find import synthesize
from ahp.schedule.synthesis.problem import Problem
from tests.marks import cases
from tests.runtime.models import BATCH, BUILDERS, JOB, batch
from tests.runtime.test_equality import FEWER_STEPS, assert_same_curve, assert_same_weights, train, world_size
from tests.runtime.workers import Pool
from tests.schedule.random_orders import random_order, with_losses_in_order

pytestmark = pytest.mark.slow


def found(stage_rank: tuple[int, ...], m: int, **problem: Any) -> dict[str, Any]:
    """The keys of a layout with the order that is found for stages of which the last one is three times as long."""
    times = [StageTimes(1.0, 2.0, 1.0, 1.0)] * (len(stage_rank) - 1) + [StageTimes(3.0, 6.0, 3.0, 3.0)]
    schedule = synthesize(Problem(tuple(times), stage_rank, m, **problem)).schedule
    return layout_of(stage_rank, order_text(schedule))


def found_each(stage_rank: tuple[int, ...], counts: tuple[int, ...]) -> dict[str, Any]:
    """The same with an order for each replica, of unlike numbers of micro-batches."""
    each = [found(stage_rank, m) for m in counts]
    lines = tuple(line for keys in each for line in keys["pipeline_parallel_order"])
    return {
        **each[0],
        "pipeline_parallel_order": lines,
        "data_parallel_replicate_degree": len(counts),
        "micro_batch_size": 1,
        "micro_batches_per_replica": counts,
    }


def layout_of(stage_rank: tuple[int, ...], order: tuple[str, ...]) -> dict[str, Any]:
    ranks = max(stage_rank) + 1
    return {
        "pipeline_parallel_degree": ranks,
        "virtual_stages_per_rank": len(stage_rank) // ranks,
        "pipeline_parallel_schedule": "Synthesized",
        "pipeline_parallel_order": order,
    }


ZERO_3 = {"data_parallel_shard_degree": 2}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "split": ("llama", {**found((0, 1), 8), "micro_batch_size": 1}),
    "uneven": ("custom", {**found((0, 1), 4), "micro_batch_size": 2, "layers_per_stage": (1, 4)}),
    "whole": ("gpt2", {**found((0, 1, 0, 1), 4, split=False), "micro_batch_size": 2}),
    "v in little memory": (
        "llama",
        {**found((0, 1, 1, 0), 8, kept_bytes=(1.0,) * 4, memory_bytes=(3.0, 3.0)), "micro_batch_size": 1},
    ),
    "neither looped nor a v": ("custom", {**found((0, 1, 0, 0), 4), "micro_batch_size": 2}),
    "zero0": ("llama", {**found((0, 1), 4), "micro_batch_size": 1, "data_parallel_replicate_degree": 2}),
    "an order for each replica": ("llama", found_each((0, 1), (5, 3))),
    "zero1": ("gpt2", {**found((0, 1), 4), "micro_batch_size": 1, **ZERO_3, "zero_stage": 1}),
    "zero2": ("custom", {**found((0, 1, 1, 0), 4), "micro_batch_size": 1, **ZERO_3, "zero_stage": 2}),
    "zero3": ("llama", {**found((0, 1, 0, 1), 4), "micro_batch_size": 1, **ZERO_3}),
    "tp": ("llama", {**found((0, 1, 1, 0), 8), "micro_batch_size": 1, "tensor_parallel_degree": 2}),
    "zero3 recomputed": (
        "gpt2",
        {**found((0, 1), 4), "micro_batch_size": 1, **ZERO_3, "activation_checkpoint": "full"},
    ),
}


# Replicas have an order each, on the same model; ZeRO-2 adds gradients up as ZeRO-3 does, and another order is a V as its own.
@pytest.mark.parametrize("layout", cases(LAYOUTS, wide=("zero0", "zero2")))
def test_a_found_order_equals_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str) -> None:
    model, keys = LAYOUTS[layout]
    results = pool.run(train, world_size(keys), model, keys, FEWER_STEPS, JOB)
    expected = plain_run(model, FEWER_STEPS)
    for result in results:
        assert result["losses"] == results[0]["losses"], "ranks disagree about the loss"
        assert result["norms"] == results[0]["norms"], "ranks disagree about the gradient norm"
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


def reductions_put_off(rank: int, world: int, layout: dict[str, Any]) -> tuple[int, bool]:
    """Runs in each worker: how many stages' gradients are waited for when the rank has done its last action, and whether the units of
    each stage may be on their way together."""
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.pipeline.schedules import Pipeline

    class Waits(list[Callable[[], None]]):
        most = 0

        def clear(self) -> None:
            self.most = len(self)
            super().clear()

    parallel = parallelize(BUILDERS["custom"](), {"job": JOB, "parallelism": layout})
    pipeline = parallel.runner
    assert isinstance(pipeline, Pipeline)
    pipeline.waits = waits = Waits()
    parallel.step(parallel.shard(batch(0)))
    together = []
    for stage in pipeline.stages.values():
        units = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        limit = getattr(
            stage._get_fsdp_state()._comm_ctx, "reduce_scatter_max_input_buffers", None
        )  # from torch 2.13 on
        together.append(limit in (None, len(units)))
    return waits.most, all(together)


def test_a_rank_goes_on_while_gradients_of_one_of_its_stages_are_reduced(pool: Pool) -> None:
    keys = {**found((0, 1, 0, 1), 2), "micro_batch_size": 2, **ZERO_3}
    assert pool.run(reductions_put_off, world_size(keys), keys) == [(2, True)] * world_size(keys)


ORDERS = 36
"""Drawn at random, as many for two ranks as for three: micro-batches in any order but at the last stage, some backwards whole, stages anywhere."""


def drawn(random: Random, ranks: int) -> dict[str, Any]:
    stages = ranks * random.choice((1, 1, 2)) if ranks == 2 else ranks
    stage_rank = [*range(ranks), *(random.randrange(ranks) for _ in range(stages - ranks))]
    random.shuffle(stage_rank)
    m = random.choice((2, 4, 8))
    schedule = with_losses_in_order(random_order(random, tuple(stage_rank), m, split=random.choice((0.0, 0.5, 1.0))))
    return {**layout_of(tuple(stage_rank), order_text(schedule)), "micro_batch_size": BATCH // m}


def one_step_each(rank: int, world: int, layouts: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Runs in each worker: the first step of a new model under each layout."""
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.torch_compat import forget_meshes

    found = []
    for layout in layouts:
        parallel = parallelize(BUILDERS["custom"](), {"job": JOB, "parallelism": layout})
        result = parallel.step(parallel.shard(batch(0)))
        found.append((result.loss, result.grad_norm))
        del parallel
        forget_meshes()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_dozens_of_random_orders_run_and_equal_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], ranks: int
) -> None:
    random = Random(ranks)
    layouts = [drawn(random, ranks) for _ in range(ORDERS // 2)]
    expected = plain_run("custom", FEWER_STEPS)
    results = pool.run(one_step_each, ranks, layouts)
    for result in results:
        assert len(result) == len(layouts)
        for loss, norm in result:
            assert loss == pytest.approx(expected["losses"][0], rel=1e-5)
            assert norm == pytest.approx(expected["norms"][0], rel=1e-5)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (("0F0,0B0", "1B0,1F0"), "pipeline_parallel_order: it never ends: ranks wait for each other at 0B0, 1B0"),
        (
            (
                ",".join(f"0F{i}" for i in range(8)) + "," + ",".join(f"0B{i}" for i in (1, 0, 2, 3, 4, 5, 6, 7)),
                ",".join(f"1F{i},1B{i}" for i in (1, 0, 2, 3, 4, 5, 6, 7)),
            ),
            "the last stage, 1, takes micro-batches [1, 0, 2, 3, 4, 5, 6, 7]",
        ),
        (("0F0,0B0", "1F0,1B0"), "made for 1 micro-batches, there are 8"),
        (("0F0,2F0,2B0,0B0", "1F0,1B0"), "3 stages, pipeline_parallel_degree x virtual_stages_per_rank are 2"),
    ],
)
def test_an_order_that_cannot_run_is_refused_before_anything_is_sent(order: tuple[str, ...], words: str) -> None:
    from ahp.plan import validated
    from ahp.runtime.limits import refuse_plan
    from ahp.runtime.parallel import Plan

    layout = {**layout_of((0, 1), order), "micro_batch_size": 1}
    with pytest.raises(BadInput) as refused:
        refuse_plan(validated(Plan, {"job": JOB, "parallelism": layout}, "plan"), torch.device("cpu"))
    assert words in str(refused.value)


def test_an_order_goes_with_its_schedule_alone() -> None:
    for keys, words in (
        ({"pipeline_parallel_schedule": "Synthesized"}, "Synthesized needs one"),
        ({"pipeline_parallel_order": ("0F0,0B0", "1F0,1B0")}, "1F1B has an order of its own"),
        (
            {"pipeline_parallel_schedule": "Synthesized", "pipeline_parallel_order": ("0F0,0B0",)},
            "1 lines, pipeline_parallel_degree is 2",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            Parallelism(pipeline_parallel_degree=2, **keys)
