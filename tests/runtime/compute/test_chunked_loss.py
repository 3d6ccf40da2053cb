"""The loss in chunks: the curve of one process, and no tensor of more than a chunk's logits, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ahp.errors import BadInput
from tests.marks import cases
from tests.runtime.models import BATCH, BUILDERS, JOB, SEQUENCE, VOCABULARY, Block, Custom, batch
from tests.runtime.test_equality import LAYOUTS, assert_same_curve, world_size
from tests.runtime.test_families import EPS, FAMILIES
from tests.runtime.workers import Pool

STEPS = 3
CASES = {
    "tied, sharded": ("gpt2", "zero3", 5),
    "split vocabulary": ("llama", "tp", 7),
    "last of two stages": ("custom", "1f1b", 5),
    "split vocabulary, sharded, last of four stages": ("llama", "zero3-x-tp-x-interleaved", 6),
    "two sequences at a time": ("gpt2", "zero0", 40),
    "trainable inputs of blocks, a head that is no module": ("biased", "zero3", 5),
    "split sequence": ("llama", "sequence+1f1b", 8),
    "gradients of weights apart": ("gpt2", "tp+zbv", 7),
    "every forward before every backward": ("gpt2", "gpipe", 5),
    "capped logits, split": ("family gemma2", "tp", 9),
    "a head of several modules": ("family bert", "zero3", 9),
}
WIDE = ("two sequences at a time", "every forward before every backward", "last of two stages", "split vocabulary")


class Largest(TorchDispatchMode):
    """The most rows of any tensor with a column for each word (or each word of this rank's part); how many tensors with a row for each
    word products have made."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.rows, self.products = words, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.products += out.shape[0] == self.words
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[-1] == self.words:
                self.rows = max(self.rows, leaf.numel() // self.words)
        return out


def train(
    rank: int, world: int, model: str, layout: dict[str, Any], chunk: int | None, precision: str = "fp32"
) -> dict[str, Any]:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    assert FAMILIES  # importing its file has made the families known
    job = {**JOB, "precision": precision, "optimizer": {**JOB["optimizer"], "eps": EPS}}
    plan = {"job": job, "parallelism": layout, "engine": {"loss_chunk_tokens": chunk}}
    parallel = parallelize(BUILDERS[model](), plan)
    words = VOCABULARY // layout.get("tensor_parallel_degree", 1)
    seen = Largest(words)
    with seen if world == 1 else nullcontext():  # it sees every operator, and this takes longer than most operators
        results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "held out": parallel.evaluate([parallel.shard(batch(STEPS))]),
        "rows": seen.rows,
        "products": seen.products,
    }


@pytest.mark.parametrize("case", cases(CASES, wide=WIDE))
def test_chunks_equal_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]], case: str) -> None:
    model, layout, chunk = CASES[case]
    expected = plain_run(model, STEPS, EPS)
    for found in pool.run(train, world_size(LAYOUTS[layout]), model, LAYOUTS[layout], chunk):
        assert_same_curve(found, expected)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process with whole logits, and one with chunks."""
    layout = {"micro_batch_size": BATCH // 2}
    (whole,), (chunked,) = (pool.run(train, 1, "llama", layout, chunk) for chunk in (None, 8))
    return whole, chunked


def test_logits_are_never_whole(alone: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Alone, where no weight has a dim as long as the vocabulary but the embedding and the head, of 32 columns."""
    whole, chunked = alone
    width = 32  # rows of a transposed weight of the head
    assert whole["rows"] == BATCH // 2 * SEQUENCE
    assert chunked["rows"] == width
    assert chunked["held out"] == pytest.approx(whole["held out"], rel=1e-6)


def test_a_chunk_makes_no_gradient_of_the_heads_size(alone: tuple[dict[str, Any], dict[str, Any]]) -> None:
    whole, chunked = alone
    assert whole["products"] == 2 * STEPS
    assert chunked["products"] == 0


def test_sums_over_chunks_are_as_exact_as_one_product_in_bf16(pool: Pool) -> None:
    """Chunks' gradients of the head are added in fp32: sixteen chunks are no further from the curve than one."""
    layout = {"micro_batch_size": BATCH}
    (whole,) = pool.run(train, 1, "llama", layout, None, "bf16")
    (chunked,) = pool.run(train, 1, "llama", layout, 8, "bf16")
    for key in ("losses", "norms"):
        assert chunked[key] == pytest.approx(whole[key], rel=2e-3)


class SecondHead(Custom):
    """A head of its own learns from the last block's output, and the blocks do not learn from it."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.tokens(input_ids) + self.positions[: input_ids.shape[1]]))
        return self.head(x) + self.second(x.detach())


class HeadAlone(Custom):
    """Only its head learns."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.tokens(input_ids) + self.positions[: input_ids.shape[1]]))
        return self.head(x.detach())


def second_head() -> nn.Module:
    torch.manual_seed(0)
    return SecondHead()


def head_alone() -> nn.Module:
    torch.manual_seed(0)
    return HeadAlone()


BUILDERS.update({"second head": second_head, "head alone": head_alone})


@pytest.mark.parametrize("model", ["second head", "head alone"])
def test_a_head_with_a_detached_input_gets_its_gradient(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], model: str
) -> None:
    (found,) = pool.run(train, 1, model, {"micro_batch_size": BATCH // 2}, 5)
    assert_same_curve(found, plain_run(model, STEPS, EPS))


class Skips(Custom):
    """Its head reads the embedding beside the last block's output."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        return self.head(self.norm(self.blocks(x) + x))


class ReadsPrevious(Custom):
    """Its head reads the token before, too."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.tokens(input_ids)))
        return self.head(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


class AttendsAfter(Custom):
    """A block that is not in the list follows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Block(32, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.blocks(self.tokens(input_ids))))


class AttendsBefore(AttendsAfter):
    """What precedes the blocks is in no chunk."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.last(self.tokens(input_ids))))


def attends_before() -> nn.Module:
    torch.manual_seed(0)
    return AttendsBefore()


BUILDERS["attends before"] = attends_before


def refused(rank: int, world: int, module: nn.Module) -> str:
    from ahp.runtime.parallel import parallelize

    plan = {"job": JOB, "engine": {"loss_chunk_tokens": 4}, "parallelism": {}}
    with pytest.raises(BadInput) as error:
        parallelize(module, plan)
    return str(error.value)


def test_a_head_that_reads_more_than_the_last_block_is_refused(pool: Pool) -> None:
    (told,) = pool.run(refused, 1, Skips())
    assert told.startswith("engine.loss_chunk_tokens = 4: what follows blocks reads more")
    (told,) = pool.run(refused, 1, nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)))
    assert told.startswith("engine.loss_chunk_tokens = 4: the model has no blocks")


@pytest.mark.parametrize(
    ("kind", "told"), [(ReadsPrevious, "aten.pad.default"), (AttendsAfter, "attention runs after blocks")]
)
def test_a_head_that_reads_other_tokens_is_refused(pool: Pool, kind: type[Custom], told: str) -> None:
    """A chunk would have its own tokens alone."""
    (found,) = pool.run(refused, 1, kind())
    assert found.startswith(f"engine.loss_chunk_tokens = 4: a chunk of tokens runs what follows blocks alone: {told}")
    assert found.endswith("(valid: null)")


def test_attention_before_the_blocks_is_in_no_chunk(pool: Pool) -> None:
    whole, chunked = (pool.run(train, 1, "attends before", {}, tokens)[0] for tokens in (None, 5))
    assert_same_curve(chunked, whole)
