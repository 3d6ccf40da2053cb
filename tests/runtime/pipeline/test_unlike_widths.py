"""Stages of their own width compute what one device would, and their checkpoints are everybody's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from ahp.errors import BadInput
from ahp.plan import Parallelism
from ahp.runtime.check.verify import verify
from ahp.runtime.pipeline.borders import Place, pieces
from ahp.runtime.ranks.device_order import mesh_places
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.ranks.test_device_order import plan
from tests.runtime.shard import test_buffers
from tests.runtime.test_equality import FEWER_STEPS, assert_same_curve, assert_same_weights, train
from tests.runtime.test_families import CALM, EPS
from tests.runtime.weights.test_checkpoint import AFTER, BEFORE, continue_from, save_after
from tests.runtime.workers import Pool


def layout(*widths: tuple[int, int], layers: tuple[int, ...] = (), **others: Any) -> dict[str, Any]:
    """Stages of these shard and tensor degrees, one a pipeline rank; two sequences at a time."""
    virtual = others.get("virtual_stages_per_rank", 1)
    if others.get("pipeline_parallel_schedule") in ("ZBVZeroBubble", "DualPipeV"):
        every = [*widths, *reversed(widths)]
    else:
        every = [*widths] * virtual
    layers = layers or {1: (5,), 2: (3, 2), 3: (2, 1, 2), 4: (1, 1, 1, 2)}[len(every)]
    places = [
        {"group": "a", "layers": count, "data_parallel_shard_degree": shard, "tensor_parallel_degree": tensor}
        for count, (shard, tensor) in zip(layers, every, strict=True)
    ]
    return {"pipeline_parallel_degree": len(widths), "micro_batch_size": 2, "stages": places, **others}


ZBV = {"pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2}
ORDER = {
    "pipeline_parallel_schedule": "Synthesized",
    "pipeline_parallel_order": ("0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3", "1F0,1I0,1F1,1B1,1W0,1F2,1B2,1F3,1B3"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-1": layout((1, 2), (1, 1)),
    "tp1-2": layout((1, 1), (1, 2)),
    "tp4-1-2": layout((1, 4), (1, 1), (1, 2)),
    "tp2-4-gpipe": layout((1, 2), (1, 4), pipeline_parallel_schedule="GPipe"),
    "sequence2-1": layout((1, 2), (1, 1), enable_sequence_parallel=True),
    "sequence1-2-4": layout((1, 1), (1, 2), (1, 4), enable_sequence_parallel=True),
    "zero1-2-1": layout((2, 1), (1, 1), zero_stage=1),
    "zero2-1-2": layout((1, 1), (2, 1), zero_stage=2),
    "zero3-2-1": layout((2, 1), (1, 1)),
    "zero3-4-2": layout((4, 1), (2, 1), micro_batch_size=4),
    "zero3-of-layout-2-1": layout((2, 1), (1, 1), data_parallel_shard_degree=2, micro_batch_size=1),
    "both": layout((2, 1), (1, 2)),
    "both-recomputed": layout((2, 2), (1, 1), activation_checkpoint="full"),
    "both-in-three": layout((1, 2), (2, 1), (1, 1), zero_stage=2),
    "both-sequence": layout((2, 1), (1, 2), enable_sequence_parallel=True, zero_stage=1),
    "interleaved-tp2-1": layout((1, 2), (1, 1), virtual_stages_per_rank=2),
    "interleaved-both": layout((1, 2), (2, 1), virtual_stages_per_rank=2),
    "zbv-tp1-2": layout((1, 1), (1, 2), **ZBV),
    "zero-bubble-both": layout((2, 1), (1, 2), pipeline_parallel_schedule="InterleavedZeroBubble"),
    "order-both": layout((2, 1), (1, 2), **ORDER),
    "replicas-tp2-1": layout((1, 2), (1, 1), data_parallel_replicate_degree=2, micro_batch_size=1, micro_batches_per_replica=(5, 3)),
    "replicas-both": layout((2, 1), (1, 2), data_parallel_replicate_degree=2, zero_stage=1),
    "as-wide-as-neighbour": layout((1, 2), (1, 2), (1, 1)),
    "context-tp2-1": layout((1, 2), (1, 1), context_parallel_degree=2),
    "context-zero3-2-1": layout((2, 1), (1, 1), context_parallel_degree=2),
    "context-zero1-both": layout((2, 1), (1, 2), context_parallel_degree=2, zero_stage=1),
    "ring-sequence1-2": layout((1, 1), (1, 2), context_parallel_degree=2, context_parallel_method="ring", enable_sequence_parallel=True),
    "all-to-all-tp1-2": layout((1, 1), (1, 2), context_parallel_degree=2, context_parallel_method="all-to-all"),
    "context-zero2-zbv": layout((1, 2), (1, 1), context_parallel_degree=2, zero_stage=2, **ZBV),
    "context-replicas": layout((1, 2), (1, 1), context_parallel_degree=2, data_parallel_replicate_degree=2, micro_batch_size=1),
    "chosen-tp4-1": layout((1, 4), (1, 1), context_parallel_degree=2),
}  # fmt: skip
FAST = {("tp2-1", "gpt2"), ("both", "custom")}
SLOW = {
    "tp4-1-2", "sequence2-1", "zero2-1-2", "both-in-three", "interleaved-both", "zbv-tp1-2", "replicas-tp2-1", "order-both",
    "context-zero1-both", "ring-sequence1-2",
}  # fmt: skip
"""Once each; all others are wide: their widths and axes are among these."""
MODELS = ("gpt2", "custom", "llama")
CASES = [(name, MODELS[turn % 3]) for turn, name in enumerate(LAYOUTS)] + [
    ("tp2-1", "custom"), ("both", "gpt2"), ("both-in-three", "gpt2"), ("interleaved-both", "gpt2"), ("replicas-both", "gpt2"),
    ("zero3-2-1", "gpt2"), ("zero2-1-2", "gpt2"), ("sequence2-1", "gpt2"), ("both", "custom"),
]  # fmt: skip
"""Models take turns; gpt2 ties its first and last stage, custom has a bare table on every one."""


WIDE = {case for case in CASES if case[0] not in SLOW or case in CASES[len(LAYOUTS) :]} - FAST


@pytest.mark.parametrize(("name", "model"), cases(dict.fromkeys(CASES), fast=FAST, wide=WIDE))
def test_equals_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]], name: str, model: str) -> None:
    world = Parallelism(**LAYOUTS[name]).world_size
    results = pool.run(train, world, model, LAYOUTS[name], FEWER_STEPS, JOB)
    expected = plain_run(model, FEWER_STEPS)
    for result in results:
        assert result["losses"] == results[0]["losses"], "ranks disagree about the loss"
        assert result["norms"] == results[0]["norms"], "ranks disagree about the gradient norm"
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


EXPERTS = {
    "tp2-1": layout((1, 2), (1, 1), layers=(1, 1)),
    "sequence-zero1-both": layout((2, 1), (1, 2), layers=(1, 1), zero_stage=1, enable_sequence_parallel=True),
    "ring-tp1-2": layout((1, 1), (1, 2), layers=(1, 1), context_parallel_degree=2, context_parallel_method="ring"),
}
EXPERT_CASES = [(name, family) for name in EXPERTS for family in ("mixtral", "qwen3_moe")]


def train_calm(rank: int, world: int, family: str, layout: dict[str, Any]) -> dict[str, Any]:
    return train(rank, world, f"family {family}", layout, FEWER_STEPS, CALM)


@pytest.mark.parametrize(
    ("name", "family"),
    cases(
        EXPERT_CASES,
        wide={
            ("tp2-1", "mixtral"),
            ("sequence-zero1-both", "qwen3_moe"),
            ("ring-tp1-2", "mixtral"),
            ("ring-tp1-2", "qwen3_moe"),
        },
    ),
)
def test_experts_equal_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], name: str, family: str
) -> None:
    results = pool.run(train_calm, Parallelism(**EXPERTS[name]).world_size, family, EXPERTS[name])
    expected = plain_run(f"family {family}", FEWER_STEPS, EPS)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


def train_with_small_sums(rank: int, world: int, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Tied gradients of 4,096 elements, 96 at a time."""
    with mock.patch("ahp.runtime.shard.ownership.SUMMED_ELEMENTS", 100):
        return train(rank, world, model, layout, 2, JOB)


@pytest.mark.slow
def test_tied_weights_are_summed_some_rows_at_a_time(pool: Pool, plain_run: Callable[..., dict[str, Any]]) -> None:
    unlike = LAYOUTS["both-in-three"]
    results = pool.run(train_with_small_sums, Parallelism(**unlike).world_size, "gpt2", unlike)
    assert_same_curve(results[0], plain_run("gpt2", 2))


def on_groups(first: tuple[int, int], last: tuple[int, int], **others: Any) -> dict[str, Any]:
    """The first stage on the cluster's second group."""
    wanted = layout(first, last, layers=(1, 3), **others)
    for stage, name in zip(wanted["stages"], ("old", "new"), strict=True):
        stage["group"] = name
    return wanted


VERIFIED = {
    "tensor": (on_groups((1, 2), (1, 1)), {}),
    "both in bf16": (on_groups((2, 1), (1, 2)), {"precision": "bf16"}),
    "muon": (on_groups((1, 2), (2, 1)), {"optimizer": {"name": "muon"}}),
    "documents": (on_groups((2, 1), (1, 2), data_parallel_shard_degree=1), {"document_mask": True}),
}


def test_workers_take_the_places_of_stages_of_their_own_width() -> None:
    assert mesh_places(plan(VERIFIED["tensor"][0])) == [2, 0, 1]


@pytest.mark.usefixtures("launched_on_pool")
@pytest.mark.parametrize("case", cases(VERIFIED, wide=["tensor"]))
def test_ahp_verify_finds_them_equal(case: str) -> None:
    wanted, job = VERIFIED[case]
    assert all(step.equal for step in verify(plan(wanted, **job), steps=3))


def looks(rank: int, world: int, model: str, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    """Evaluates, looks for a fault, and writes files for transformers."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS[model](), {"job": JOB, "parallelism": layout})
    mean = parallel.evaluate([parallel.shard(batch(0))])
    parallel.export_hf(folder)
    result = parallel.step(parallel.shard(batch(0)))
    return {"mean": mean, "fault": parallel.find_fault(parallel.shard(batch(0)), result)}


@pytest.mark.parametrize("name", cases(["both-in-three", "interleaved-both", "zero3-4-2"], wide=["zero3-4-2"]))
def test_evaluates_and_exports_as_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], tmp_path: Path, name: str
) -> None:
    unlike = LAYOUTS[name]
    found = pool.run(looks, Parallelism(**unlike).world_size, "llama", unlike, str(tmp_path))
    expected = plain_run("llama", 1)["losses"][0]
    assert all(one["mean"] == pytest.approx(expected, rel=1e-5) for one in found)
    assert {one["fault"] for one in found} == {
        "all outputs and gradients are numbers; only the loss or the norm overflows"
    }
    written = {key: value for file in tmp_path.glob("*.safetensors") for key, value in load_file(file).items()}
    whole = BUILDERS["llama"]().state_dict()
    assert set(written) == set(whole)
    assert all(torch.equal(written[key], whole[key]) for key in whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-1", "both"])
def test_buffers_of_several_stages_are_those_of_one_process(pool: Pool, name: str) -> None:
    """Also the buffers of the model itself, which every stage has and one stage writes."""
    unlike = layout(*Parallelism(**LAYOUTS[name]).widths, layers=(1, 3))
    found, expected = (
        pool.run(test_buffers.train, Parallelism(**unlike).world_size, "counted", unlike),
        test_buffers.plain("counted"),
    )
    for one in found:
        assert_same_curve(one, expected)
        for step, buffers in enumerate(one["buffers"]):
            for key, value in buffers.items():
                if name == "both" and "count" not in key:  # means of a rank's own rows
                    continue
                torch.testing.assert_close(value, expected["buffers"][step][key])


MOVES = [
    ("both", {}, "gpt2"),
    ("zero3-2-1", {}, "gpt2"),
    ("interleaved-tp2-1", {"data_parallel_shard_degree": 2}, "custom"),
    ("context-zero1-both", {"data_parallel_shard_degree": 2, "micro_batch_size": 2}, "gpt2"),
]
"""``both`` has the shards of zero3-2-1, and parts of the sequence hold no weights: these two are wide."""


@pytest.mark.parametrize(
    ("name", "other", "model"),
    cases(MOVES, wide=[case for case in MOVES if case[0] in ("zero3-2-1", "context-zero1-both")]),
)
def test_checkpoints_are_read_under_one_width_and_back(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], tmp_path: Path, name: str, other: dict[str, Any], model: str
) -> None:
    unlike = LAYOUTS[name]
    expected = plain_run(model, BEFORE + AFTER)
    for saved, loaded in ((unlike, other), (other, unlike)):
        folder = tmp_path / ("from-unlike" if saved is unlike else "to-unlike")
        before = pool.run(save_after, Parallelism(**saved).world_size, model, saved, str(folder))[0]
        after = pool.run(continue_from, Parallelism(**loaded).world_size, model, loaded, str(folder))[0]
        assert_same_curve({key: before[key] + after[key] for key in before}, expected)


@pytest.mark.parametrize("one", [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("other", [(1, 1), (1, 2), (4, 1), (2, 4)])
def test_every_element_crosses_a_cut_once(one: tuple[int, int], other: tuple[int, int]) -> None:
    rows, positions = 8, 16
    ranks = [[(shard, tensor) for tensor in range(one[1])] for shard in range(one[0])]
    peers = [[100 * shard + tensor for tensor in range(other[1])] for shard in range(other[0])]
    whole = torch.arange(rows * positions).view(rows, positions)
    sent: dict[int, list[torch.Tensor]] = {}
    for shard, tensor in (place for row in ranks for place in row):
        place = Place(shard, one[0], tensor, one[1])
        mine = _part(whole, place)
        for piece in pieces(place, peers, rows, positions):
            sent.setdefault(piece.peer, []).append(piece.of(mine))
    numbers = [[10 * shard + tensor for tensor in range(one[1])] for shard in range(one[0])]
    for shard in range(other[0]):
        for tensor in range(other[1]):
            place = Place(shard, other[0], tensor, other[1])
            mine = _part(whole, place)
            awaited = pieces(place, numbers, rows, positions)
            came = sent[peers[shard][tensor]]
            assert len(awaited) == len(came)
            for piece, part in zip(awaited, came, strict=True):
                torch.testing.assert_close(piece.of(mine), part)
            assert sum(part.numel() for part in came) == mine.numel()


def _part(whole: torch.Tensor, place: Place) -> torch.Tensor:
    rows, positions = place.part(*whole.shape)
    return whole[rows.start : rows.stop, positions.start : positions.stop]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (
            {"micro_batch_size": 1, "stages": [(2, 1), (1, 1)]},
            "stages.data_parallel_shard_degree = 2: does not divide the 1 sequence of",
        ),
        (
            {"zero_stage": 0, "stages": [(2, 1), (1, 1)]},
            "stages.data_parallel_shard_degree = 2: zero_stage 0 shards nothing",
        ),
        (
            {"expert_parallel_degree": 2, "stages": [(1, 2), (1, 1)]},
            "expert_parallel_degree = 2: with stages of unlike width",
        ),
        ({"mesh_order": ["pp"], "stages": [(1, 2), (1, 1)]}, None),
        ({"mesh_order": ["tp", "pp"], "tensor_parallel_degree": 2, "stages": [(1, 2), (1, 1)]}, "mesh_order = "),
        ({"stages": [(1, 2)]}, "there is one stage, and the layout sets its width"),
    ],
)
def test_what_stages_of_their_own_width_do_not_go_with_is_refused(given: dict[str, Any], rule: str | None) -> None:
    given = {**layout(*given.pop("stages")), **given}
    if rule is None:  # the usual order
        assert Parallelism(**given).mesh_order is None
        return
    with pytest.raises(ValueError, match=rule):
        Parallelism(**given)


def test_a_layout_says_the_width_of_each_rank() -> None:
    found = Parallelism(**layout((2, 1), (1, 4), data_parallel_replicate_degree=3, micro_batch_size=2))
    assert found.world_size == 3 * (2 + 4)
    assert found.zero_stage == 3
    assert [p.micro_batch_size for p in map(found.of_rank, range(2))] == [1, 2]
    assert [p.zero_stage for p in found.layouts_of_ranks] == [3, 0]
    assert "on(a:3/dp2/tp1 a:2/dp1/tp4)" in found.short()
    assert " sp " in Parallelism(**LAYOUTS["sequence2-1"]).short()
    assert " sp " not in Parallelism(**LAYOUTS["tp2-1"]).short()
    alike = Parallelism(pipeline_parallel_degree=2, tensor_parallel_degree=2)
    assert alike.layouts_of_ranks == (alike,)
    assert alike.of_rank(1) is alike


def refused(rank: int, world: int, model: str, layout: dict[str, Any]) -> str:
    from ahp.runtime.parallel import parallelize
    from tests.runtime.models import BUILDERS

    with pytest.raises(BadInput) as error:
        parallelize(BUILDERS[model](), {"job": JOB, "parallelism": layout})
    return str(error.value)


def test_stages_of_one_rank_of_two_widths_are_refused(pool: Pool) -> None:
    given = layout((1, 2), (1, 1), virtual_stages_per_rank=2)
    given["stages"][2]["tensor_parallel_degree"] = 1
    (told,) = set(pool.run(refused, 3, "custom", given))
    assert told == (
        "stages.tensor_parallel_degree = 1: stage 3 is computed by the same devices as stage 1, whose degree is 2 (valid: 2)"
    )
