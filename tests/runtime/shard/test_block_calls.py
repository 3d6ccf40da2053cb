"""Blocks that FSDP2 shards, called as data say, or in ways that FSDP2 does not see: the curve of one process, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ahp.errors import BadInput
from ahp.graph.outline import outline
from tests.marks import cases
from tests.runtime.compute import test_bf16
from tests.runtime.graphs import no_kernels
from tests.runtime.models import BATCH, JOB, OPTIMIZER, VOCABULARY, Block, Custom, batch
from tests.runtime.test_equality import FEWER_STEPS, assert_same_curve, assert_same_weights, world_size
from tests.runtime.workers import Pool

MICRO, NUM_BLOCKS = 2, 3
WIDTH = 32


class Own(Custom):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(WIDTH, layers=0)
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(input_ids) + self.positions[: input_ids.shape[1]]

    def inner(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(input_ids, self.embed(input_ids))))


class ScalesEmbedding(Own):
    """Its first norm gets fp32, which torch refuses on a CPU in other words than a product does."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.first = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.first(super().embed(input_ids) * self.get_buffer("scale"))


class ScalesLogits(Own):
    """As ``ScalesEmbedding``, behind its blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(input_ids, self.embed(input_ids))) * self.get_buffer("scale"))


class LeavesOut(Own):
    """A token of the micro-batch selects the block that is skipped, or none."""

    def inner(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        without = int(input_ids[0, 1]) % (NUM_BLOCKS + 1)
        for number, block in enumerate(self.blocks):
            if number != without:
                x = block(x)
        return x


class LeavesOutFrozen(LeavesOut):
    """What enters the blocks has no gradient."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.tokens.requires_grad_(False)
        self.positions.requires_grad_(False)


class ListedExperts(Own):
    """The one list of modules that it has is of experts, which get some tokens or none."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.attention = blocks[0]

    def inner(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        chosen = input_ids[:, 1:2].expand_as(input_ids) % len(self.blocks)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.blocks):
            if (rows := chosen == number).any():
                out = out.masked_scatter(rows[..., None], expert(x[rows]))
        return x + out


class ChangesViews(Own):
    """Its blocks return views, which it changes in place."""

    def inner(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x *= 0.9
        return x


class Viewing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten(0, 1).view(x.shape)


class ReadsWeight(Own):
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.blocks[0].norm_1.weight  # type: ignore


class CallsMethod(Own):
    def inner(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.1
        return super().forward(x)


class Decays(Block):
    """As the lightning attention of MiniMax: its tables are buffers."""

    decay: torch.Tensor

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("decay", torch.eye(sizes[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.decay


MODELS: dict[str, tuple[type[Own], type[Block]]] = {
    "leaves out": (LeavesOut, Block),
    "leaves out, frozen": (LeavesOutFrozen, Block),
    "listed experts": (ListedExperts, Block),
    "changes views": (ChangesViews, Viewing),
    "reads a weight": (ReadsWeight, Block),
    "calls a method": (CallsMethod, Block),
    "in place": (Own, InPlace),
    "two types": (Own, Decays),
    "scaled": (ScalesEmbedding, Block),
    "scaled behind": (ScalesLogits, Block),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, block = MODELS[name]
    return kind([block(WIDTH, 4) for _ in range(NUM_BLOCKS)])


@cache
def plain(name: str) -> dict[str, Any]:
    """One process, in the micro-batches of the layouts."""
    model = build(name)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER["learning_rate"], betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"]
    )  # fmt: skip
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(FEWER_STEPS):
        data, total = batch(step), 0.0
        scored = (data["labels"][:, 1:] != -100).sum()
        for ids, labels in zip(data["input_ids"].split(MICRO), data["labels"].split(MICRO), strict=True):
            logits = model(ids)[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / scored
            loss.backward()
            total += loss.item()
        found["losses"].append(total)
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"]).item())
        optimizer.step()
        optimizer.zero_grad()
    return found | {"weights": {n: p.detach() for n, p in model.named_parameters()}}


def train(rank: int, world: int, name: str, layout: dict[str, Any], precision: str = "fp32") -> dict[str, Any]:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    plan = {"job": {**JOB, "precision": precision}, "parallelism": {**layout, "micro_batch_size": MICRO}}
    parallel = parallelize(build(name), plan)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(FEWER_STEPS)]
    whole = parallel.state.layout.whole
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "held out": parallel.evaluate([parallel.shard(batch(9))]),
        "weights": {n: whole(n, p.detach()) for n, p in sorted(parallel.parameters.items())},
    }


SHARDS = {"data_parallel_shard_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {**SHARDS, "zero_stage": 1},
    "zero2": {**SHARDS, "zero_stage": 2},
    "zero3": {**SHARDS, "zero_stage": 3},
    "zero3-recompute": {**SHARDS, "zero_stage": 3, "activation_checkpoint": "full"},
    "replicate-x-zero2": {**SHARDS, "zero_stage": 2, "data_parallel_replicate_degree": 2},
}
CASES = [
    (layout, name)
    for layout in LAYOUTS
    for name in ("leaves out", "leaves out, frozen", "listed experts", "changes views")
]
FAST = {("zero3", "leaves out"), ("zero3", "changes views")}
WIDE = {
    *(("zero2", name) for name in ("leaves out, frozen", "listed experts", "changes views")),
    *(("replicate-x-zero2", name) for name in ("leaves out", "listed experts", "changes views")),
    ("zero1", "changes views"),
}
"""ZeRO-2 sums gradients as ZeRO-3 and keeps weights as ZeRO-1, whose cases stay, beside one of its own and one of its replicas; views that are
changed stay under ZeRO-3, which lets go of weights between blocks."""


@pytest.mark.parametrize(("layout", "name"), cases(CASES, fast=FAST, wide=WIDE))
def test_the_curve_is_that_of_one_process(pool: Pool, layout: str, name: str) -> None:
    results = pool.run(train, world_size(LAYOUTS[layout]), name, LAYOUTS[layout])
    assert_same_curve(results[0], plain(name))
    assert_same_weights(results, plain(name))
    assert len({result["held out"] for result in results}) == 1


@pytest.mark.parametrize("layout", ["replicas", "zero3"])
@pytest.mark.parametrize("name", ["leaves out", "listed experts"])
def test_the_curve_in_16_bits_is_that_of_one_process(pool: Pool, layout: str, name: str) -> None:
    asked = LAYOUTS.get(layout, {"data_parallel_replicate_degree": 2})
    (one,) = pool.run(train, 1, name, {}, "bf16")
    several = pool.run(train, 2, name, asked, "bf16")[0]
    for key in ("losses", "norms"):
        assert several[key] == pytest.approx(one[key], rel=test_bf16.LAST)


def why_refused(rank: int, world: int, name: str, precision: str = "fp32") -> str:
    with pytest.raises(BadInput) as refused:
        train(rank, world, name, LAYOUTS["zero3"], precision)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "where", "told"),
    [
        ("reads a weight", ReadsWeight.embed, "reads a weight of a block outside of the block's call"),
        ("calls a method", Block.forward, "reads a weight of a block outside of the block's call"),
        ("in place", InPlace.forward, "changes the input of a block in place"),
    ],
)
def test_what_fsdp2_cannot_do_is_refused_by_the_models_line(
    pool: Pool, name: str, where: Callable[..., Any], told: str
) -> None:
    for message in pool.run(why_refused, 2, name):
        assert f"{where.__code__.co_filename}:" in message
        assert told in message


def why_refused_compiled(rank: int, world: int) -> str:
    from ahp.runtime.parallel import parallelize

    plan = {"job": JOB, "parallelism": {**LAYOUTS["zero3"], "micro_batch_size": MICRO}, "engine": {"compile": True}}
    parallel = parallelize(build("in place"), plan)
    with no_kernels(), pytest.raises(BadInput) as refused:
        parallel.step(parallel.shard(batch(0)))
    return str(refused.value)


def test_a_compiled_block_that_changes_its_input_is_refused_by_the_models_line(pool: Pool) -> None:
    for message in pool.run(why_refused_compiled, 2):
        assert (
            f"{InPlace.forward.__code__.co_filename}:{InPlace.forward.__code__.co_firstlineno + 1} changes the"
            in message
        )


def test_a_buffer_that_meets_16_bits_is_told_by_the_models_line(pool: Pool) -> None:
    (message,) = {*pool.run(why_refused, 2, "two types", "bf16")}
    assert f"{Decays.forward.__code__.co_filename}:" in message
    assert "mixes an fp32 tensor, such as a buffer" in message
    assert message.endswith("(valid: cast the tensor with .to(x.dtype); or job.precision fp32)")
    (of_norm,) = {*pool.run(why_refused, 2, "scaled", "bf16")}
    assert f"{ScalesEmbedding.embed.__code__.co_filename}:" in of_norm
    assert of_norm.endswith("(valid: cast the tensor with .to(x.dtype); or job.precision fp32)")


def in_chunks(rank: int, world: int) -> str:
    from ahp.runtime.parallel import parallelize

    plan = {"job": {**JOB, "precision": "bf16"}, "engine": {"loss_chunk_tokens": 4}}
    with pytest.raises(BadInput) as refused:
        parallelize(build("scaled behind"), plan).step(batch(0))
    return str(refused.value)


def test_a_buffer_that_meets_16_bits_in_a_loss_in_chunks_is_told_by_the_models_line(pool: Pool) -> None:
    (message,) = pool.run(in_chunks, 1)
    assert f"{ScalesLogits.forward.__code__.co_filename}:" in message
    assert "mixes an fp32 tensor, such as a buffer" in message


def in_16_bits(rank: int, world: int) -> str:
    """Weights that are held in bf16 on one rank, which no FSDP2 casts."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(build("two types"), {"job": {**JOB, "precision": "bf16", "dtype": "bf16"}})
    with pytest.raises(BadInput) as refused:
        parallel.step(parallel.shard(batch(0)))
    return str(refused.value)


def test_a_buffer_that_meets_weights_held_in_16_bits_is_told_by_the_models_line(pool: Pool) -> None:
    (message,) = pool.run(in_16_bits, 1)
    assert f"{Decays.forward.__code__.co_filename}:" in message
    assert "mixes an fp32 tensor, such as a buffer" in message


class TurnsQueries(Block):
    """By a table that its forward makes in fp32, as hand-written rotary positions do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q * torch.ones(WIDTH), k * torch.ones(WIDTH), v)


def test_a_look_at_a_model_names_two_types() -> None:
    module = Own([TurnsQueries(WIDTH, 4) for _ in range(NUM_BLOCKS)])
    with pytest.raises(BadInput, match=r"it mixes an fp32 tensor, such as a buffer, .* job\.precision fp32\): "):
        outline(module, batch_size=1, sequence_length=16, dtype=torch.bfloat16)


def test_the_data_leave_out_each_block_and_none() -> None:
    """In each step's micro-batches, which are a rank's first or not; else nothing was tried."""
    first = [int(batch(step)["input_ids"][row, 1]) for step in range(FEWER_STEPS) for row in range(0, BATCH, MICRO)]
    assert {one % (NUM_BLOCKS + 1) for one in first} == set(range(NUM_BLOCKS + 1))
    assert VOCABULARY > NUM_BLOCKS
