"""Sliced blocks of many shapes compute what one process does: loss, gradient norm, weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from ahp.engines.traits import KernelTraits
from ahp.forecast.activations import ActivationLiveness
from ahp.forecast.division import Division
from ahp.forecast.kernels import kernels
from ahp.forecast.split import split, way_of_keys
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.runtime.tensor.sliced_dropout import with_own_numbers
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, VOCABULARY, Block, NormedRows, custom
from tests.runtime.test_equality import assert_same_curve, assert_same_weights, train
from tests.runtime.workers import Pool
from tests.search.families import build

STEPS = 3


def family(model_type: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(model_type, device="cpu", **more)


class OneProduct(nn.Module):
    """Heads that no degree divides and one product with a weight: nothing can be split without a gather."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.softmax(self.mix(x), dim=-1)


class Mixers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(OneProduct(32) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixers() -> nn.Module:
    torch.manual_seed(0)
    return Mixers()


def normed() -> nn.Module:
    module = custom()
    module.tokens = NormedRows(VOCABULARY, 32)
    return module


FAMILIES = ("cohere", "glm", "deepseek_v2", "minicpm3", "qwen2_moe")
"""What the families of test_families.py have not: interleaved rotary embeddings, latent attention, shared experts."""


class Shared(nn.Module):
    """A feed-forward network that all blocks share, with an adapter for each, chosen by number, as Zamba2's."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 96, bias=False), nn.Linear(48, 32, bias=False)
        self.adapters = nn.ModuleList(nn.Linear(32, 96, bias=False) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        gate, up = (self.gate_up(x) + self.adapters[number](x)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class OfShared(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.norm, self.shared = nn.LayerNorm(32), shared

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x + self.shared(self.norm(x), number)


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Shared(2)
        self.tokens, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(OfShared(shared) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for number, block in enumerate(self.blocks):
            x = block(x, number)
        return self.head(x)


def numbered() -> nn.Module:
    torch.manual_seed(0)
    return Numbered()


BUILDERS.update({name: partial(family, name) for name in FAMILIES})
BUILDERS["few-keys"] = partial(family, "llama")
BUILDERS["one-key"] = partial(family, "llama", num_key_value_heads=1)
BUILDERS["mixers"] = mixers
BUILDERS["normed"] = normed
BUILDERS["numbered"] = numbered
BUILDERS["falcon"] = partial(family, "falcon")
CASES = [
    *((name, 2) for name in FAMILIES),
    ("few-keys", 4),
    ("one-key", 2),
    ("mixers", 2),
    ("normed", 2),
    ("numbered", 2),
    ("falcon", 2),
]
KEPT_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
}


FEW_KEYS = {
    "sequence": {"tensor_parallel_degree": 4, "enable_sequence_parallel": True},
    "ring": {"tensor_parallel_degree": 4, "context_parallel_degree": 2, "context_parallel_method": "ring"},
    "recomputed shards": {
        "tensor_parallel_degree": 4,
        "data_parallel_shard_degree": 2,
        "activation_checkpoint": "full",
    },
}
"""What the whole keys of more ranks than heads meet."""


EPS = 1e-6
"""Of AdamW where weights are compared: below it a gradient is all but zero, and with 1e-8 Adam makes a step of full size out of its rounding, which
differs from one processor to the next."""


def train_sliced(rank: int, world: int, name: str, steps: int) -> dict[str, Any]:
    job = {**JOB, "optimizer": {**OPTIMIZER, "eps": EPS}}
    return train(rank, world, name, {"tensor_parallel_degree": world, "micro_batch_size": 4}, steps, job)


def train_few_keys(rank: int, world: int, layout: str, steps: int) -> dict[str, Any]:
    return train(rank, world, "few-keys", {"micro_batch_size": 4, **FEW_KEYS[layout]}, steps, JOB)


@pytest.mark.parametrize(("name", "degree"), CASES)
def test_a_sliced_model_equals_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], name: str, degree: int
) -> None:
    results = pool.run(train_sliced, degree, name, STEPS)
    expected = plain_run(name, STEPS, EPS)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


@pytest.mark.parametrize("layout", cases(FEW_KEYS, wide={"recomputed shards"}))
def test_more_ranks_than_key_heads_equal_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str
) -> None:
    world = math.prod(degree for key, degree in FEW_KEYS[layout].items() if key.endswith("_degree"))
    results = pool.run(train_few_keys, world, layout, STEPS)
    assert_same_curve(results[0], plain_run("few-keys", STEPS))


def held_of_a_block(rank: int, world: int, heads: int, in_parts: bool) -> tuple[int, int]:
    """In each worker: elements of a block's parameters, and bytes that autograd keeps of what it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from ahp.runtime.tensor.slice import slice_module
    from ahp.search.slicing.model import slice_model

    model = family("llama", num_key_value_heads=heads, **KEPT_SIZES)
    layers = model.model.layers
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    slicing = slice_model(model, world, enable_sequence_parallel=in_parts)
    slice_module(model, slicing, dict(enumerate(layers)), init_device_mesh("cpu", (world,)))
    own, given = layers[1].forward, {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        given.update({id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)})
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            return own(*args, **kwargs)

    layers[1].forward = watched
    out = model(input_ids=torch.zeros(2, 32, dtype=torch.long)).logits
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in layers[1].parameters()]
    for known in (*parts, *given.values()):
        kept.pop(known.untyped_storage().data_ptr(), None)
    del out
    return sum(p.numel() for p in parts), sum(kept.values())


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts of the sequence"])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_rank_holds_what_the_forecast_says(pool: Pool, heads: int, in_parts: bool) -> None:
    graph = analyze(
        family("llama", num_key_value_heads=heads, **KEPT_SIZES),
        Job(sequence_length=32, precision="fp32"),
        micro_batch_size=2,
    )
    block = graph.blocks[0]
    parts = split(block, "block", way_of_keys=way_of_keys(block, 4, "whole"))
    elements = sum(p.numel // (4 if p.name in parts.parameters else 1) for p in block.parameters)
    division = Division(parts, 4, in_parts)
    memory = ActivationLiveness(block, kernels(block, KernelTraits("traced")), parts).on(division, keeps_gathered=True)
    assert block.output is not None
    handed_on = round(block.output.bytes * division.hidden_share)  # what the next block keeps
    for result in pool.run(held_of_a_block, 4, heads, in_parts):
        assert result == (elements, memory.saved - handed_on)


class Mixing(nn.Module):
    """33 columns: neither n nor k can be split in two, the batch can."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(33, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x).tanh()


def run_rewritten(rank: int, world: int, kind: str) -> list[tuple[str, float]]:
    """In each worker: a block's rewritten graph beside the block; the largest difference of each result."""
    import torch.distributed as dist

    from ahp.graph.capture import capture
    from ahp.runtime.tensor.collectives import cut_segments
    from ahp.runtime.tensor.rewrite import rewrite
    from ahp.search.slicing.placement import Placement, Split
    from ahp.search.slicing.solve import solve

    torch.manual_seed(0)
    block = Mixing() if kind == "batch" else Block(32, 4)
    x = torch.randn(4, 8, 33 if kind == "batch" else 32, requires_grad=True)
    captured = capture(block, (x,), {})
    found = solve(captured, world, hidden=0 if kind == "sequence" else None)

    def part(whole: torch.Tensor, place: Placement) -> torch.Tensor:
        split = isinstance(place, Split)
        return cut_segments(whole, place.dim, place.segments, world, rank) if split else whole  # type: ignore[union-attr]

    assert dist.group.WORLD is not None
    outer = Split(1, (8,), tokens=True) if kind == "sequence" else found.placed[captured.activation_nodes()[0]]
    expected = block(x)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    weights = [part(w.detach(), found.weights[n]).requires_grad_() for n, w in block.named_parameters()]
    mine = part(x.detach(), outer).clone().requires_grad_()
    (out,) = rewrite(captured, found, dist.group.WORLD, {})(weights, [mine])
    out.backward(part(gradient, outer))
    pairs = [("out", out, part(expected, outer)), ("x", mine.grad, part(x.grad, outer))]  # type: ignore[arg-type]
    for weight, (name, parameter) in zip(weights, block.named_parameters(), strict=True):
        assert parameter.grad is not None
        pairs.append((name, weight.grad, part(parameter.grad, found.weights[name])))
    return [(name, (a - b).abs().max().item()) for name, a, b in pairs]


@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_split_tokens_give_the_same_results_and_gradients(pool: Pool, kind: str) -> None:
    """Sequence parallelism, whose block holds parts of the sequence, and the batch as the last resort."""
    for result in pool.run(run_rewritten, 2, kind):
        assert all(difference < 2e-5 for _, difference in result), result


def test_each_rank_drops_by_its_own_numbers() -> None:
    dropped = []
    for rank in range(2):
        torch.manual_seed(0)
        own = with_own_numbers(torch.ops.aten.dropout.default, rank)(torch.ones(1000), 0.5, True)
        dropped.append((own, torch.rand(4)))
    (a, after_a), (b, after_b) = dropped
    assert 400 < (a == 0).sum() < 600
    assert 400 < (a != b).sum() < 600
    assert torch.equal(after_a, after_b), "what ranks draw together afterwards is the same"
