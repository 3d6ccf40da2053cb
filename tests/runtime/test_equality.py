"""Every layout computes what one device would: loss and pre-clip gradient norm of each step, and the final weights.

The reference is plain PyTorch (tests/runtime/models.py): the module, torch.optim.AdamW, clip_grad_norm_, one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.marks import cases
from tests.runtime.models import BATCH, BUILDERS, JOB, MODELS, batch
from tests.runtime.workers import Pool

STEPS, FEWER_STEPS = 20, 3
"""Of each technique alone on the model whose turn it is, which shows what rounding grows to; and of the rest, where the first shows the
loss and its gradient, the second the update, the third what the optimizer kept."""
TOLERANCE_FIRST, TOLERANCE_LAST = 1e-5, 1e-4
"""Relative, at the first step and at the twentieth; between them it grows evenly."""

ZERO = {
    "zero0": {"data_parallel_replicate_degree": 2, "micro_batch_size": 2},
    "zero1": {"data_parallel_shard_degree": 2, "zero_stage": 1, "micro_batch_size": 2},
    "zero2": {"data_parallel_shard_degree": 2, "zero_stage": 2, "micro_batch_size": 2},
    "zero3": {"data_parallel_shard_degree": 2, "zero_stage": 3, "micro_batch_size": 2},
}
TENSOR = {"tp": {"tensor_parallel_degree": 2, "micro_batch_size": 4}}
PIPELINE = {
    "gpipe": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe", "micro_batch_size": 2},
    "1f1b": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B", "micro_batch_size": 2},
    "interleaved": {
        "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B", "virtual_stages_per_rank": 2, "micro_batch_size": 2
    },
}  # fmt: skip
SPLIT = {
    "zero-bubble": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"},
    "interleaved-zero-bubble": {
        "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble", "virtual_stages_per_rank": 2
    },
    "zbv": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2},
    "dual-pipe-v": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "DualPipeV", "virtual_stages_per_rank": 2},
}  # fmt: skip
"""Schedules that compute weight gradients apart."""
SEQUENCE = {"sequence": {"tensor_parallel_degree": 2, "enable_sequence_parallel": True, "micro_batch_size": 4}}
ALONE = {**ZERO, **TENSOR, **PIPELINE}
"""Split weights take longest on a CPU: they go through the batch in two micro-batches, pipelines in four or eight."""


def pairs() -> dict[str, dict[str, Any]]:
    """Every pair of two different techniques, two sequences at a time."""
    families = [ZERO, TENSOR, PIPELINE]
    return {
        f"{a}+{b}": {**families[i][a], **families[j][b], "micro_batch_size": 2}
        for i in range(3)
        for j in range(i + 1, 3)
        for a in families[i]
        for b in families[j]
    }


MORE: dict[str, dict[str, Any]] = {
    "one": {},
    "one-mb4": {"micro_batch_size": 4},
    "tp-mb1": {"tensor_parallel_degree": 2, "micro_batch_size": 1},
    "replicate-x-zero1": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 1},
    "replicate-x-zero2": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 2},
    "replicate-x-zero3": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 3},
    "zero3-mb1": {"data_parallel_shard_degree": 2, "micro_batch_size": 1},
    "zero0-mb4": {"data_parallel_replicate_degree": 2, "micro_batch_size": 4},
    "zero3-recompute": {"data_parallel_shard_degree": 2, "activation_checkpoint": "full", "micro_batch_size": 2},
    "tp+1f1b-recompute": {**TENSOR["tp"], **PIPELINE["1f1b"], "activation_checkpoint": "full"},
    "1f1b-some-recomputed": {**PIPELINE["1f1b"], "activation_checkpoint": "full", "recomputed_layers_per_stage": (2, 1)},
    "1f1b-uneven": {**PIPELINE["1f1b"], "layers_per_stage": (1, 4)},
    "interleaved-uneven": {**PIPELINE["interleaved"], "layers_per_stage": (2, 1, 1, 1), "micro_batch_size": 2},
    "1f1b-4-stages": {"pipeline_parallel_degree": 4},
    "zero3-4-ways": {"data_parallel_shard_degree": 4},
    "dp-x-tp-x-pp": {"data_parallel_replicate_degree": 2, **TENSOR["tp"], **PIPELINE["1f1b"], "micro_batch_size": 2},
    "zero3-x-tp-x-interleaved": {"data_parallel_shard_degree": 2, **TENSOR["tp"], **PIPELINE["interleaved"], "micro_batch_size": 2},
    "replicate-x-zero3-x-tp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "replicate-x-zero2-x-gpipe": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 2, **PIPELINE["gpipe"], "micro_batch_size": 1},
    "zero3-8-ways": {"data_parallel_shard_degree": 8},
    "zero0-uneven": {"data_parallel_replicate_degree": 2, "micro_batch_size": 2, "micro_batches_per_replica": (3, 1)},
    "replicate-x-zero3-uneven": {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "micro_batches_per_replica": (3, 1)
    },
    "replicate-x-zero1-uneven": {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 1, "micro_batches_per_replica": (1, 3)
    },
    "zero0+1f1b-uneven": {
        "data_parallel_replicate_degree": 2, **PIPELINE["1f1b"], "micro_batch_size": 1, "micro_batches_per_replica": (5, 3),
        "stages": (
            {"group": ("fast", "slow"), "layers": 3, "recomputed_layers": (0, 2)},
            {"group": ("fast", "slow"), "layers": 2, "recomputed_layers": 1},
        ),
        "activation_checkpoint": "full",
    },
    "1f1b-few": {"pipeline_parallel_degree": 4, "micro_batch_size": 4},
    "zero-bubble-few": {**SPLIT["zero-bubble"], "pipeline_parallel_degree": 4, "micro_batch_size": 4},
    "zero0+zero-bubble-uneven": {
        **ZERO["zero0"], **SPLIT["zero-bubble"], "micro_batch_size": 1, "micro_batches_per_replica": (7, 1),
        "stages": ({"group": ("fast", "slow"), "layers": 3}, {"group": ("fast", "slow"), "layers": 2}),
    },
    **SPLIT,
    "zero0+zbv": {**ZERO["zero0"], **SPLIT["zbv"], "micro_batch_size": 1},
    "zero3+dual-pipe-v": {**ZERO["zero3"], **SPLIT["dual-pipe-v"], "micro_batch_size": 1},
    "zero3+interleaved-zero-bubble": {**ZERO["zero3"], **SPLIT["interleaved-zero-bubble"]},
    "tp+zbv": {**TENSOR["tp"], **SPLIT["zbv"], "micro_batch_size": 2},
    "zbv-recompute": {**SPLIT["zbv"], "activation_checkpoint": "full"},
    **SEQUENCE,
    "sequence+zero3": {**ZERO["zero3"], **SEQUENCE["sequence"], "micro_batch_size": 2},
    "sequence+1f1b": {**PIPELINE["1f1b"], **SEQUENCE["sequence"], "micro_batch_size": 2},
    "sequence+zbv-recompute": {**SPLIT["zbv"], **SEQUENCE["sequence"], "micro_batch_size": 2, "activation_checkpoint": "full"},
    "zero3-selective": {**ZERO["zero3"], "activation_checkpoint": "selective"},
    "tp-selective": {**TENSOR["tp"], "activation_checkpoint": "selective"},
    "sequence+zbv-selective": {**SPLIT["zbv"], **SEQUENCE["sequence"], "micro_batch_size": 2, "activation_checkpoint": "selective"},
    "sequence-4-ways": {"tensor_parallel_degree": 4, "enable_sequence_parallel": True, "micro_batch_size": 4},
}  # fmt: skip
ON_ONE_MODEL = (
    *pairs(), "one-mb4", "tp-mb1", "zero3-mb1", "zero0-mb4", "zero3-recompute", "tp+1f1b-recompute", "1f1b-4-stages", "zero3-4-ways",
    "1f1b-some-recomputed",
    "zero3-x-tp-x-interleaved", "replicate-x-zero3-x-tp", "replicate-x-zero2-x-gpipe", "zero3-8-ways", *SPLIT, "zero0+zbv",
    "zero3+dual-pipe-v", "zero3+interleaved-zero-bubble", "tp+zbv", "zbv-recompute", "sequence+zero3", "sequence+1f1b",
    "sequence+zbv-recompute", "sequence-4-ways", "zero3-selective", "tp-selective", "sequence+zbv-selective", "zero0-uneven", "replicate-x-zero3-uneven",
    "replicate-x-zero1-uneven", "zero0+1f1b-uneven", "1f1b-few", "zero-bubble-few", "zero0+zero-bubble-uneven",
)  # fmt: skip
"""Layouts whose techniques all models have gone through already, in other degrees: the models take turns."""
SEEN_IN_PRODUCTS = (
    *(f"zero{stage}+{schedule}" for stage in range(4) for schedule in ("gpipe", "interleaved")),
    *("zero0+tp", "zero0+1f1b", "tp+1f1b", "zero3+tp", "tp+interleaved"),
    *("zero1+tp", "zero1+1f1b", "zero3+1f1b", "tp+gpipe", "zero0+zbv"),
    *("zero3-mb1", "zero0-mb4", "zero3-8-ways", "1f1b-4-stages", "sequence+zbv-selective", "replicate-x-zero3-x-tp"),
)
"""Pairs in larger products here, in ZeRO-1 x tensor x pipeline of tests/runtime/test_families.py, or below on blocks with trainable inputs
(zero3+1f1b); schedules and stages that other layouts have too (zero0+zero-bubble-uneven, 1f1b-few); other degrees and sizes; and products whose
pairs others have (sequence+zbv-recompute with tp-selective, replicate-x-zero3 with zero3-x-tp-x-interleaved)."""
LAYOUTS = {**ALONE, **pairs(), **MORE}
FAST = {("zero0", "llama"), ("zero0-uneven", "custom"), ("1f1b", "gpt2"), ("zero3", "custom"), ("tp", "llama")}
"""Layouts and models that are compared in the fast part: each technique alone, and where weights are tied or unnamed."""


def models_of(layout: str) -> tuple[str, ...]:
    """All models, or the one whose turn it is; the order moves on by one each round, so that no schedule keeps a model."""
    if layout not in ON_ONE_MODEL:
        return tuple(MODELS)
    round_, place = divmod(ON_ONE_MODEL.index(layout), len(MODELS))
    return (tuple(MODELS)[(place + round_) % len(MODELS)],)


LONG = {(layout, tuple(MODELS)[turn % len(MODELS)]) for turn, layout in enumerate([*ALONE, "dp-x-tp-x-pp"])}
CASES = [(layout, model) for layout in LAYOUTS for model in models_of(layout)]
IN_OTHERS = {
    ("dp-x-tp-x-pp", "llama"), ("replicate-x-zero2", "gpt2"), ("replicate-x-zero1", "llama"), ("replicate-x-zero3", "custom"),
    ("zero0", "custom"), ("zero1", "custom"), ("tp", "custom"), ("1f1b", "custom"), ("interleaved", "custom"), ("sequence", "custom"),
    ("interleaved-uneven", "llama"), ("one", "llama"), ("dual-pipe-v", "gpt2"), ("zero-bubble", "llama"), ("interleaved-zero-bubble", "custom"),
    ("zbv-recompute", "custom"),
}  # fmt: skip
"""Products whose every pair the model goes through, and which another model goes through at length; what is in a larger product or in a
harder form (uneven, of single sequences) on the same model; uneven chunks of stages and one device, which another model has."""
TURNS = {layout: tuple(MODELS)[turn % len(MODELS)] for turn, layout in enumerate(LAYOUTS)}
WIDE = [
    (layout, model)
    for layout, model in CASES
    if (layout, model) in IN_OTHERS
    or (
        (layout, model) not in FAST | LONG
        and ((layout not in ON_ONE_MODEL and model not in ("custom", TURNS[layout])) or layout in SEEN_IN_PRODUCTS)
    )
]
"""What goes through every model: all but the one that nobody prepared and the one whose turn it is, which
tests/runtime/test_families.py has for the techniques; and pairs that are in larger products."""


def world_size(layout: dict[str, Any]) -> int:
    size = 1
    for key in (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "context_parallel_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
    ):
        size *= layout.get(key, 1)
    return size


def train(rank: int, world: int, model: str, layout: dict[str, Any], steps: int, job: dict[str, Any]) -> dict[str, Any]:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS[model](), {"job": job, "parallelism": layout})
    results = [parallel.step(parallel.shard(batch(step))) for step in range(steps)]
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "weights": {
            name: parallel.state.layout.whole(name, p.detach()) for name, p in sorted(parallel.parameters.items())
        },
    }


def assert_same_curve(got: dict[str, Any], expected: dict[str, Any]) -> None:
    steps = len(expected["losses"])
    for key in ("losses", "norms"):
        assert len(got[key]) == steps
        for step, (a, b) in enumerate(zip(got[key], expected[key], strict=True)):
            allowed = TOLERANCE_FIRST + (TOLERANCE_LAST - TOLERANCE_FIRST) * step / (STEPS - 1)
            assert abs(a - b) <= allowed * abs(b), f"{key}, step {step}: {a} instead of {b}"


def assert_same_weights(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Every rank's parameters equal the reference's, and together the ranks hold all parameters."""
    assert set().union(*(result["weights"] for result in results)) == set(expected["weights"])
    for result in results:
        for name, weight in result["weights"].items():
            torch.testing.assert_close(
                weight, expected["weights"][name], rtol=1e-4, atol=ATOL, msg=lambda m, n=name: f"{n}: {m}"
            )


ATOL = 3e-5
"""A thirtieth of one step of AdamW at this learning rate: where a gradient is all but zero, Adam makes a step of full size
out of its rounding."""


@pytest.mark.parametrize(
    ("layout", "model"),
    cases(CASES, fast=FAST, wide=WIDE),
)
def test_layout_equals_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str, model: str
) -> None:
    world = world_size(LAYOUTS[layout])
    steps = STEPS if (layout, model) in LONG else FEWER_STEPS
    results = pool.run(train, world, model, LAYOUTS[layout], steps, JOB)
    expected = plain_run(model, steps)
    for result in results:
        assert result["losses"] == results[0]["losses"], "ranks disagree about the loss"
        assert result["norms"] == results[0]["norms"], "ranks disagree about the gradient norm"
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "tp", "interleaved", "tp+1f1b", "zero3+1f1b"])
def test_blocks_with_trainable_inputs_equal_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str
) -> None:
    results = pool.run(train, world_size(LAYOUTS[layout]), "biased", LAYOUTS[layout], FEWER_STEPS, JOB)
    expected = plain_run("biased", FEWER_STEPS)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


@pytest.mark.slow
def test_clipping_is_active(plain_run: Callable[..., dict[str, Any]]) -> None:
    """Else the equality of clipped runs would say nothing about clipping."""
    for model in MODELS:
        assert min(plain_run(model, STEPS)["norms"]) > JOB["optimizer"]["grad_clip"]


def test_parts_differ_in_scored_tokens() -> None:
    """Else a mean of means would pass."""
    scored = (batch(0)["labels"][:, 1:] != -100).sum(dim=1).tolist()
    assert sum(scored[: BATCH // 2]) != sum(scored[BATCH // 2 :])
