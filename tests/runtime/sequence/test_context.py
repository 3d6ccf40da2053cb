"""Context parallelism computes what one device would: loss and pre-clip gradient norm of each step, and the final weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ahp.forecast.rules import context
from ahp.graph.trace import analyze
from ahp.plan import EngineChoice, Parallelism
from ahp.runtime.sequence import partial_attention
from ahp.runtime.sequence.partial_attention import Rule, hidden_value
from tests.marks import cases
from tests.runtime.models import BUILDERS, SEQUENCE, VOCABULARY, Block, batch
from tests.runtime.test_equality import FEWER_STEPS, assert_same_curve, assert_same_weights, train, world_size
from tests.runtime.test_families import CALM, EPS
from tests.runtime.workers import Pool

TWO = {"context_parallel_degree": 2, "micro_batch_size": 4}
RING = {**TWO, "context_parallel_method": "ring"}
HEADS = {**TWO, "context_parallel_method": "all-to-all"}
ONE_F_ONE_B = {"pipeline_parallel_degree": 2, "micro_batch_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ring": RING,
    "all-to-all": HEADS,
    "ring-4-ways": {**RING, "context_parallel_degree": 4},
    "all-to-all-4-ways": {**HEADS, "context_parallel_degree": 4},
    "chosen": TWO,
    "ring+zero0": {**RING, "data_parallel_replicate_degree": 2, "micro_batch_size": 2},
    "ring+zero3": {**RING, "data_parallel_shard_degree": 2, "micro_batch_size": 2},
    "all-to-all+zero2-over-context-alone": {**HEADS, "zero_stage": 2, "micro_batch_size": 2},
    "ring+replicate-x-zero1": {
        **RING, "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 1, "micro_batch_size": 2
    },
    "ring+zero1-in-another-order": {
        **RING, "data_parallel_shard_degree": 2, "zero_stage": 1, "data_parallel_replicate_degree": 2, "micro_batch_size": 2,
        "mesh_order": ("dp_shard", "dp_replicate", "cp"),
    },
    "ring+replicate-x-zero1-over-context-alone-in-another-order": {
        **RING, "data_parallel_replicate_degree": 2, "zero_stage": 1, "micro_batch_size": 2,
        "mesh_order": ("cp", "dp_replicate"),
    },
    "ring+1f1b": {**RING, **ONE_F_ONE_B},
    "all-to-all+1f1b": {**HEADS, **ONE_F_ONE_B},
    "ring+zbv-recompute": {
        **RING, **ONE_F_ONE_B, "pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2,
        "activation_checkpoint": "full",
    },
    "ring-selective": {**RING, "activation_checkpoint": "selective"},
    "all-to-all-recompute": {**HEADS, "activation_checkpoint": "full"},
    "ring+tp": {**RING, "tensor_parallel_degree": 2},
    "all-to-all+tp": {**HEADS, "tensor_parallel_degree": 2},
    "ring+sequence": {**RING, "tensor_parallel_degree": 2, "enable_sequence_parallel": True},
    "all-to-all+zero3-x-tp-x-1f1b": {
        **HEADS, "zero_stage": 3, "tensor_parallel_degree": 2, **ONE_F_ONE_B, "enable_sequence_parallel": True
    },
}  # fmt: skip


class PackedBlock(Block):
    """Grouped keys, and a mask of documents that may be trainable, or of single keys."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.relu(self.up(self.norm_2(x))))


class Packed(nn.Module):
    """Several documents in a row: attention stays within each document. Every token below 16 ends a document."""

    def __init__(self, width: int = 32, layers: int = 2, *, single_keys: bool = False) -> None:
        super().__init__()
        self.single_keys = single_keys
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(PackedBlock(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        ends = input_ids < 16
        document = ends.cumsum(1) - ends.long()
        if self.single_keys:  # the tokens that end a document are seen by none
            mask = ~ends[:, None, None, :] | (position == 0)
        else:
            mask = (document[:, None, :, None] == document[:, None, None, :]) & (position[:, None] >= position)
        x = self.tokens(input_ids) + self.positions(position)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def packed() -> nn.Module:
    torch.manual_seed(0)
    return Packed()


def single_keys() -> nn.Module:
    torch.manual_seed(0)
    return Packed(single_keys=True)


class WeightedKeys(Packed):
    """Every head adds a trained number of its own to the products with a key, by the key's token."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(VOCABULARY, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        mask = self.weights(input_ids).transpose(1, 2).unsqueeze(2)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def weighted_keys() -> nn.Module:
    torch.manual_seed(0)
    return WeightedKeys()


class Rotating(Block):
    """Makes its own positions, from the length of what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x * torch.arange(x.shape[1], device=x.device).cos()[:, None].to(x.dtype)
        return super().forward(turned)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(Rotating(32, 4) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.tokens.weight.T


class Averaged(nn.Module):
    """What comes after its blocks looks at all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return (x - x.mean(1, keepdim=True)) @ self.tokens.weight.T


class AttendsAgain(Averaged):
    """What comes after its blocks is one more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Block(32, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.last(x) @ self.tokens.weight.T


BUILDERS.update(
    {
        "packed": packed,
        "single keys": single_keys,
        "weighted keys": weighted_keys,
        "rotated": Rotated,
        "averaged": Averaged,
        "attends again": AttendsAgain,
    }
)


def run(rank: int, world: int, model: str, layout: dict[str, Any], steps: int) -> dict[str, Any]:
    """Runs in each worker, which finds the models by importing this file."""
    return train(rank, world, model, layout, steps, CALM)


def run_in_chunks(rank: int, world: int, layout: dict[str, Any]) -> list[float]:
    """Losses and norms of a loss that is computed five tokens at a time."""
    from ahp.runtime.parallel import parallelize

    plan = {"job": CALM, "parallelism": layout, "engine": {"loss_chunk_tokens": 5}}
    parallel = parallelize(BUILDERS["llama"](), plan)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(FEWER_STEPS)]
    return [r.loss for r in results] + [r.grad_norm for r in results]


MODELS_OF: dict[str, tuple[str, ...]] = {
    "ring": ("llama", "gpt2", "family bert", "packed", "single keys", "family mixtral", "family gemma3_text"),
    "all-to-all": (
        "llama",
        "custom",
        "family bert",
        "packed",
        "single keys",
        "weighted keys",
        "family qwen3_moe",
        "biased",
    ),
    "all-to-all+1f1b": ("biased",),
    "ring-4-ways": ("packed",),
    "ring+1f1b": ("packed",),
    "ring+tp": ("gpt2", "packed", "custom"),
    "all-to-all+tp": ("llama", "custom"),
    "ring+sequence": ("packed",),
    "ring+zbv-recompute": ("custom",),
}
"""LLaMA goes through the layouts that are not named."""
CASES = [(layout, model) for layout in LAYOUTS for model in MODELS_OF.get(layout, ("llama",))]
WIDE = {
    ("ring", "gpt2"), ("ring", "family mixtral"), ("all-to-all", "llama"), ("all-to-all", "custom"), ("all-to-all", "family bert"),
    ("ring+zero0", "llama"), ("ring+replicate-x-zero1", "llama"), ("ring+tp", "gpt2"),
    ("all-to-all-recompute", "llama"), ("all-to-all+zero3-x-tp-x-1f1b", "llama"), ("ring+zero1-in-another-order", "llama"),
    ("ring", "llama"), ("ring+tp", "packed"), ("all-to-all+tp", "custom"), ("all-to-all", "family qwen3_moe"),
}  # fmt: skip
"""Layouts whose parts others have too (ring+zero3 and ring-selective the ring of LLaMA, ring+sequence that of sliced blocks with a mask), and
models that tests/runtime/test_families.py takes through context parallelism, all-to-all. Slices that share key heads stay."""


@pytest.mark.parametrize(("layout", "model"), cases(CASES, wide=WIDE))
def test_context_parallel_equals_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str, model: str
) -> None:
    results = pool.run(run, world_size(LAYOUTS[layout]), model, LAYOUTS[layout], FEWER_STEPS)
    expected = plain_run(model, FEWER_STEPS, EPS)
    for result in results:
        assert result["losses"] == results[0]["losses"], "ranks disagree about the loss"
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


def test_the_loss_of_own_tokens_in_chunks(pool: Pool, plain_run: Callable[..., dict[str, Any]]) -> None:
    expected = plain_run("llama", FEWER_STEPS, EPS)
    for found in pool.run(run_in_chunks, 4, {**RING, **ONE_F_ONE_B}):
        assert found == pytest.approx([*expected["losses"], *expected["norms"]], rel=1e-5)


def resume(rank: int, world: int, folder: str, layout: dict[str, Any], first: int, last: int) -> list[float]:
    """Steps ``first`` to ``last``; continues from the folder where there is one, else begins, and writes it."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS["llama"](), {"job": CALM, "parallelism": layout})
    if first:
        parallel.load(folder)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(first, last)]
    if not first:
        parallel.save(folder)
    loss = parallel.evaluate([parallel.shard(batch(100))])
    return [number for r in results for number in (r.loss, r.grad_norm)] + [loss]


def test_a_checkpoint_loads_under_context_parallelism_and_out_of_it(pool: Pool, tmp_path: Path) -> None:
    layouts = {"one": {}, "ring": {**RING, "zero_stage": 3}, "heads": {**HEADS, **ONE_F_ONE_B}}
    ranks = {"one": 1, "ring": 2, "heads": 4}
    continued = {}
    for before, after in (("one", "ring"), ("ring", "one"), ("ring", "heads")):
        folder = str(tmp_path / f"{before} {after}")
        started = pool.run(resume, ranks[before], folder, layouts[before], 0, 2)[0]
        continued[before, after] = started + pool.run(resume, ranks[after], folder, layouts[after], 2, 4)[0]
    whole = continued["ring", "one"]
    for found in continued.values():
        assert found == pytest.approx(whole, rel=1e-5)


def refused(rank: int, world: int, model: str, layout: dict[str, Any], job: dict[str, Any]) -> str:
    from ahp.errors import AhpError
    from ahp.runtime.parallel import parallelize

    with pytest.raises(AhpError) as error:
        parallelize(BUILDERS[model](), {"job": {**CALM, **job}, "parallelism": layout})
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "layout", "job", "words"),
    [
        (
            "llama", {**RING, "data_parallel_shard_degree": 2, "mesh_order": ("cp", "dp_shard")}, {},
            ("mesh_order = ['cp', 'dp_shard']", "dp_shard before cp"),
        ),
        ("llama", RING, {"sequence_length": 18}, ("context_parallel_degree = 2", "sequence_length 18")),
        ("rotated", RING, {}, ("context_parallel_degree = 2", "aten.mul.Tensor", "positions", "(valid: 1)")),
        ("averaged", RING, {}, ("context_parallel_degree = 2", "aten.mean.dim", "(valid: 1)")),
        ("attends again", RING, {}, ("context_parallel_degree = 2: attention runs after blocks, where it would see", "(valid: 1)")),
        ("attends again", HEADS, {}, ("context_parallel_degree = 2: attention runs after blocks, where it would see", "(valid: 1)")),
        ("biased", RING, {}, ("context_parallel_method = 'ring'", "trainable", "all-to-all")),
        ("llama", {**HEADS, "context_parallel_degree": 8}, {}, ("context_parallel_method = 'all-to-all'", "4 attention heads", "ring")),
    ],
    ids=["order", "uneven", "positions", "mixed after the blocks", "attends after the blocks, ring", "attends after the blocks", "trainable", "heads"],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(
    pool: Pool, model: str, layout: dict[str, Any], job: dict[str, Any], words: tuple[str, ...]
) -> None:
    ranks = layout["context_parallel_degree"] * layout.get("data_parallel_shard_degree", 1)
    message = pool.run(refused, ranks, model, layout, job)[0]
    assert all(word in message for word in words), message


@pytest.mark.slow
def test_a_forecast_refuses_attention_after_the_blocks() -> None:
    layout = Parallelism(context_parallel_degree=2)
    told = [
        context(analyze(model, {"sequence_length": 16}), layout, EngineChoice())
        for model in (AttendsAgain(), Averaged())
    ]
    assert told[0] is not None
    assert "context_parallel_degree = 2: attention runs after the model's blocks" in told[0]
    assert told[1] is None


@pytest.mark.parametrize("form", ["all", "causal", "mask"])
@pytest.mark.parametrize("values", [8, 6], ids=["fused", "written out"])
def test_parts_of_the_keys_join_to_the_whole(form: str, values: int) -> None:
    """``values`` of another width than the keys (latent attention) take the path without a kernel."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    k, v = torch.randn(2, 2, 12, 8, requires_grad=True), torch.randn(2, 2, 12, values, requires_grad=True)
    gradient = torch.randn(2, 4, 6, values)
    seen = torch.ones(6, 12, dtype=torch.bool)
    if form == "causal":  # the queries are the tokens of the first half
        seen = torch.arange(6)[:, None] >= torch.arange(12)
    elif form == "mask":
        seen = torch.rand(6, 12) < 0.3
        seen[:, 3] = True
        seen[2, 6:] = False  # a row that sees nothing of one part
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    wanted = torch.autograd.grad(expected, (q, k, v), gradient)

    with torch.no_grad():
        parts = [slice(0, 6), slice(6, 12)][: 1 if form == "causal" else 2]
        rules = [_rule(form, seen[:, part]) for part in parts]
        found = [
            partial_attention.forward(q, k[:, :, p], v[:, :, p], rule) for p, rule in zip(parts, rules, strict=True)
        ]
        sums = torch.stack([s for _, s in found]).logsumexp(0)
        out = sum((o * (s - sums).exp().unsqueeze(-1) for o, s in found), torch.zeros(()))
        torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)
        given = [
            partial_attention.backward(gradient, q, k[:, :, p], v[:, :, p], out, sums, rule)
            for p, rule in zip(parts, rules, strict=True)
        ]
    torch.testing.assert_close(sum(of_q for of_q, _, _ in given), wanted[0], rtol=1e-4, atol=1e-5)
    for number in (1, 2):
        joined = torch.cat([part[number] for part in given], 2)
        torch.testing.assert_close(joined, wanted[number][:, :, : joined.shape[2]], rtol=1e-4, atol=1e-5)


def _rule(form: str, seen: torch.Tensor) -> Rule:
    if form == "mask":
        return Rule(0.3, mask=torch.zeros(seen.shape).masked_fill(~seen, hidden_value(torch.float32))[None, None])
    return Rule(0.3, causal=form == "causal")


def test_every_token_is_on_one_rank() -> None:
    from ahp.runtime.sequence.context import Context

    whole = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    for method in ("ring", "all-to-all"):
        context = Context(_Ranks(), method)  # type: ignore[arg-type]
        parts = [context.own(whole, 1, rank) for rank in range(4)]
        assert context.joined(parts, 1).equal(whole)
    assert Context(_Ranks(), "ring").own(whole, 1, 1)[0].tolist() == [2, 3, 12, 13]  # type: ignore[arg-type]


class _Ranks:
    """In the place of a process group of four."""

    def size(self) -> int:
        return 4
