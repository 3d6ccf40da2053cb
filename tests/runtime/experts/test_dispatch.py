"""Expert parallelism: mixtures whose experts are divided over ranks train as one process does, and so do their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ahp.errors import BadInput
from ahp.graph.outline import outline
from ahp.runtime.experts.dispatch import check_experts
from ahp.runtime.experts.sliced_experts import splits_of_experts
from ahp.runtime.tensor.slice import meta_copy
from ahp.search.slicing.model import slice_outline
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, VOCABULARY, batch
from tests.runtime.test_equality import FEWER_STEPS, assert_same_curve, assert_same_weights, train, world_size
from tests.runtime.test_families import family
from tests.runtime.workers import Pool
from tests.search.families import build

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 4},
    "ep2-zero1": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2, "zero_stage": 1, "micro_batch_size": 2},
    "ep2-zero2": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2, "zero_stage": 2},
    "ep2-zero3": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2, "micro_batch_size": 2},
    "ep4": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 4, "micro_batch_size": 2},
    "ep2-replicas": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
    "ep2-replicas-zero2": {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4, "expert_parallel_degree": 2, "zero_stage": 2,
    },
    "ep2-1f1b": {
        "pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 2,
    },
    "ep2-zero-bubble": {
        "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble", "zero_stage": 1,
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2,
    },
    "ep2-1f1b-in-another-order": {
        "pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 2,
        "mesh_order": ["dp_shard", "pp"],
    },
    "ep2-full": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 2, "activation_checkpoint": "full",
    },
    "ep2-selective": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 2,
        "activation_checkpoint": "selective",
    },
    "ep2-ring": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "context_parallel_degree": 2,
        "context_parallel_method": "ring", "micro_batch_size": 2,
    },
    "ep2-context-alone": {"context_parallel_degree": 2, "expert_parallel_degree": 2, "zero_stage": 3, "micro_batch_size": 4},
    "ep4-context": {
        "data_parallel_shard_degree": 2, "context_parallel_degree": 2, "expert_parallel_degree": 4, "zero_stage": 1,
        "micro_batch_size": 2,
    },
    "ep2-tensor": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "tensor_parallel_degree": 2, "micro_batch_size": 4,
    },
    "ep2-sequence-zbv": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "tensor_parallel_degree": 2,
        "enable_sequence_parallel": True, "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble",
        "zero_stage": 1, "micro_batch_size": 2, "activation_checkpoint": "selective",
    },
    "ep2-tensor-ring": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "tensor_parallel_degree": 2, "micro_batch_size": 2,
        "context_parallel_degree": 2, "context_parallel_method": "ring", "activation_checkpoint": "full",
    },
    "zero3": {"data_parallel_shard_degree": 2, "micro_batch_size": 2},
    "ep2-zero2-selective": {
        "data_parallel_shard_degree": 4, "expert_parallel_degree": 2, "zero_stage": 2, "activation_checkpoint": "selective",
    },
    "one": {"micro_batch_size": 4},
}  # fmt: skip
CASES = [
    (layout, ("mixtral", "qwen3_moe")[number % 2])
    for number, layout in enumerate(LAYOUTS)
    if "ep" in layout and layout != "ep2-zero2-selective"
]
CASES += [("ep2-zero3", "deepseek_v3"), ("ep2-zero2-selective", "deepseek_v3")]
WIDE = (
    "ep2-tensor-ring",
    "ep2-zero1",
    "ep2-replicas",
    "ep2-1f1b-in-another-order",
    "ep2-full",
    "ep2-zero-bubble",
    "ep2-context-alone",
    "ep2-zero2",
    "ep2-zero2-selective",
    "ep2",
)
"""Layouts whose parts others have too; tests/runtime/test_families.py has Mixtral under ep2."""
BUILDERS.update({f"family {name}": partial(family, name) for name in ("mixtral", "qwen3_moe", "deepseek_v3")})


class Experts(nn.Module):
    """Written by somebody else: other names, a loop over experts."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.n_experts = num_experts
        self.into = nn.Parameter(torch.randn(num_experts, width, 2 * width) * 0.2)
        self.out_of = nn.Parameter(torch.randn(num_experts, 2 * width, width) * 0.2)
        self.bias = nn.Parameter(torch.zeros(num_experts, width))

    def forward(self, x: torch.Tensor, which: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in range(self.n_experts):
            part = (which == number) * share
            out = out + part.sum(1, keepdim=True) * (
                F.relu(x @ self.into[number]) @ self.out_of[number] + self.bias[number]
            )
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(width), nn.Linear(width, 4), Experts(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).reshape(-1, x.shape[-1])
        scores = (self.router(tokens) - 100.0 * torch.tensor([0, 0, 1, 1])).softmax(-1)
        share, which = scores.topk(2)
        return x + self.experts(tokens, which, share=share).view(x.shape)


class Lopsided(nn.Module):
    """Every token goes to the first two of four experts, so that other ranks get none."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def lopsided() -> nn.Module:
    torch.manual_seed(0)
    return Lopsided()


BUILDERS["lopsided"] = lopsided


def train_experts(rank: int, world: int, name: str, layout: str) -> dict[str, Any]:
    """Runs in each worker, which finds the models by importing this file."""
    return train(rank, world, name, LAYOUTS[layout], FEWER_STEPS, JOB)


@pytest.mark.parametrize(("layout", "family"), cases(CASES, wide=[case for case in CASES if case[0] in WIDE]))
def test_divided_experts_equal_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str, family: str
) -> None:
    results = pool.run(train_experts, world_size(LAYOUTS[layout]), f"family {family}", layout)
    expected = plain_run(f"family {family}", FEWER_STEPS)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


@pytest.mark.parametrize("layout", ["ep2", pytest.param("ep4", marks=pytest.mark.slow)])
def test_ranks_without_a_token_take_part(pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str) -> None:
    results = pool.run(train_experts, world_size(LAYOUTS[layout]), "lopsided", layout)
    expected = plain_run("lopsided", FEWER_STEPS)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


OTHERS: dict[str, tuple[dict[str, Any], float]] = {
    "muon": ({"optimizer": {**JOB["optimizer"], "name": "muon"}}, 1e-4),
    "bf16": ({"precision": "bf16"}, 1e-2),
}
"""Other jobs, and the relative difference that is allowed: for bf16 that of ``ahp verify``."""


def train_other(rank: int, world: int, layout: str, other: str) -> dict[str, Any]:
    return train(rank, world, "family mixtral", LAYOUTS[layout], 3, {**JOB, **OTHERS[other][0]})


# Muon sees whole matrices of experts, which each layout cuts in its own way; rounding is the same for both.
@pytest.mark.parametrize(
    ("layout", "other"),
    cases(
        [(layout, other) for layout in ("ep2-zero3", "ep2-tensor") for other in OTHERS], wide=[("ep2-tensor", "bf16")]
    ),
)
def test_other_optimizers_and_precisions(pool: Pool, layout: str, other: str) -> None:
    (one,), (divided, *_) = pool.run(train_other, 1, "one", other), pool.run(train_other, 4, layout, other)
    for key in ("losses", "norms"):
        assert divided[key] == pytest.approx(one[key], rel=OTHERS[other][1])


def held(
    rank: int, world: int, layout: str, model: str = "lopsided"
) -> dict[str, tuple[list[int], dict[int, list[tuple[int, int]]]]]:
    """Of each parameter of this rank's experts: its shape here, and which part of the whole it is."""
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.torch_compat import local_tensor

    parallel = parallelize(BUILDERS[model](), {"job": JOB, "parallelism": LAYOUTS[layout]})
    names = sorted(parallel.state.layout.experts)
    return {n: (list(local_tensor(parallel.parameters[n]).shape), parallel.state.layout.ranges(n)) for n in names}


def test_each_rank_holds_its_part(pool: Pool) -> None:
    name = "blocks.1.experts.into"  # [4, 16, 32]
    assert [of[name][0] for of in pool.run(held, 2, "ep2")] == [[2, 16, 32]] * 2
    assert [of[name][1] for of in pool.run(held, 4, "ep2-zero3")] == [{0: [(i, i + 1)]} for i in (0, 2, 1, 3)]
    # one expert is left for each two ranks of the eight, which divide its rows
    wide = {"data_parallel_shard_degree": 8, "expert_parallel_degree": 4}
    results = pool.run(held_under, 8, wide)
    assert [of[name][0] for of in results] == [[1, 8, 32]] * 8
    assert results[5][name][1] == {0: [(1, 2)], 1: [(8, 16)]}
    # each of two ranks has half of the experts, and of each expert half of the rows of gate and of up
    name = "model.layers.1.mlp.experts.gate_up_proj"  # [4, 2 x 96, 64]
    results = pool.run(held, 4, "ep2-tensor", "family mixtral")
    assert [of[name][0] for of in results] == [[2, 96, 64]] * 4
    assert results[3][name][1] == {0: [(2, 4)], 1: [(48, 96), (144, 192)]}


@pytest.mark.slow
def test_experts_are_cut_where_their_own_forward_gives_a_summand() -> None:
    """A bias after the last product would be added on every rank: such experts stay whole."""
    for module, expected in ((family("mixtral"), {"gate_up_proj": 1, "down_proj": 2}), (lopsided(), {})):
        found = outline(module, batch_size=2, sequence_length=16)
        (block,) = slice_outline(found, 2).blocks
        path = found.experts[0].removeprefix(f"{found.blocks_path}.0.")
        stacks = meta_copy(module.get_submodule(found.experts[0]))
        splits = splits_of_experts(stacks, path, block, found.hidden.shape[-1], 2)
        assert {name: split.dim for name, split in splits.items()} == expected


def held_under(rank: int, world: int, layout: dict[str, Any]) -> Any:
    LAYOUTS["another"] = layout
    return held(rank, world, "another")


def save(rank: int, world: int, layout: str, folder: str) -> dict[str, Any]:
    """Two steps, a checkpoint, weights for transformers."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(family("mixtral"), {"job": JOB, "parallelism": LAYOUTS[layout]})
    results = [parallel.step(parallel.shard(batch(step))) for step in range(2)]
    parallel.save(f"{folder}/checkpoint")
    parallel.export_hf(f"{folder}/hf")
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


def go_on(rank: int, world: int, layout: str, folder: str) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(family("mixtral").apply(blank), {"job": JOB, "parallelism": LAYOUTS[layout]})
    parallel.load(f"{folder}/checkpoint")
    results = [parallel.step(parallel.shard(batch(step))) for step in (2, 3)]
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


def blank(module: nn.Module) -> None:
    """Whatever a module was built with must not matter."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    cases(
        [("ep2-zero3", "ep4"), ("ep4", "one"), ("zero3", "ep2-1f1b"), ("ep2-tensor", "ep2-ring")],
        wide=[("ep4", "one"), ("zero3", "ep2-1f1b")],
    ),
)
def test_a_checkpoint_is_cut_again(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], tmp_path: Path, saved: str, loaded: str
) -> None:
    before = pool.run(save, world_size(LAYOUTS[saved]), saved, str(tmp_path))[0]
    after = pool.run(go_on, world_size(LAYOUTS[loaded]), loaded, str(tmp_path))[0]
    assert_same_curve({key: before[key] + after[key] for key in before}, plain_run("family mixtral", 4))


def start(rank: int, world: int, layout: str, folder: str) -> dict[str, Any]:
    """From weights of transformers: parts of experts that were read, and the logits' loss of one step."""
    from ahp.graph.models import build_model
    from ahp.runtime.parallel import parallelize

    plan = {"job": JOB, "parallelism": LAYOUTS[layout], "init_from": folder}
    parallel = parallelize(build_model(folder, device="meta"), plan)
    result = parallel.step(parallel.shard(batch(2)))
    return {"losses": [result.loss], "norms": [result.grad_norm]}


def test_starts_from_given_weights(pool: Pool, plain_run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    pool.run(save, 4, "ep2-zero3", str(tmp_path))
    expected = plain_run("family mixtral", FEWER_STEPS)
    for layout in ("ep4", "ep2-zero3", "ep2-tensor"):
        got = pool.run(start, 4, layout, str(tmp_path / "hf"))[0]
        for key in got:
            assert got[key] == pytest.approx(expected[key][2:3], rel=1e-5)


def gathered(rank: int, world: int, layout: str) -> int:
    """Elements that FSDP2 gathers on this rank, by the mesh on which each parameter lies."""
    from torch.distributed.tensor import DTensor

    from ahp.runtime.parallel import parallelize

    parallel = parallelize(family("mixtral"), {"job": JOB, "parallelism": LAYOUTS[layout]})
    found = 0
    for name, parameter in parallel.parameters.items():
        axes = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
        if {"dp_shard", "efsdp"} & set(axes):
            found += parameter.numel() // (parallel.mesh.size("ep") if name in parallel.state.layout.experts else 1)
    return found


@pytest.mark.parametrize("layout", ["ep2", "ep2-zero1"])
def test_the_forecast_counts_what_is_gathered(pool: Pool, layout: str) -> None:
    """Experts that one rank has alone are left out; those that ranks share are not."""
    from ahp.cluster.model import Cluster
    from ahp.forecast.step import price
    from ahp.graph.trace import analyze
    from ahp.job import Job
    from ahp.plan import EngineChoice, Parallelism

    job = Job.model_validate(JOB)
    given = {**LAYOUTS[layout], "zero_stage": 1}  # keeps all that it gathers
    cluster = Cluster.parse(f"{world_size(given)}xH100-SXM-80GB")
    priced = price(analyze(build("mixtral"), job), cluster, job, Parallelism.model_validate(given), EngineChoice())
    assert [4 * count for count in pool.run(gathered, world_size(given), layout)] == (
        [priced.forecast.memory["gathered_weights"]] * world_size(given)
    )


def test_experts_that_are_not_seen_are_refused() -> None:
    from ahp.graph.outline import outline

    dense, mixture = build("llama"), build("mixtral")
    with pytest.raises(BadInput, match=r"expert_parallel_degree = 2: .*\[T, K\].*valid: 1"):
        check_experts(dense, outline(dense, batch_size=1, sequence_length=8), 2)
    found = outline(mixture, batch_size=1, sequence_length=8)
    assert found.experts == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    with pytest.raises(
        BadInput, match=r"= 3: does not divide the 4 experts of model.layers.0.mlp.experts.*valid: 1, 2, 4"
    ):
        check_experts(mixture, found, 3)
