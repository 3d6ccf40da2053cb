"""Documents that share a sequence do not see each other: under every layout a step is that of the documents one by one.

The reference knows nothing of masks: plain PyTorch on one process, each document a sequence of its own.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ahp.graph.models import is_masked
from tests.marks import cases, skip_where_slices_do_not_compile
from tests.runtime.graphs import no_kernels
from tests.runtime.models import BATCH, BUILDERS, OPTIMIZER, SEQUENCE, VOCABULARY, batch
from tests.runtime.sequence.test_context import PackedBlock
from tests.runtime.test_equality import assert_same_curve, world_size
from tests.runtime.test_families import CALM, EPS
from tests.runtime.workers import Pool
from tests.search.families import build

JOB = {**CALM, "document_mask": True}
STEPS, HELD_OUT = 3, 100
TENSOR = {"tensor_parallel_degree": 2, "micro_batch_size": 4}
CONTEXT = {"context_parallel_degree": 2, "micro_batch_size": 4}
PIPELINE = {"pipeline_parallel_degree": 2, "micro_batch_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 2},
    "zero3-recompute": {"data_parallel_shard_degree": 2, "activation_checkpoint": "full", "micro_batch_size": 2},
    "tp": TENSOR,
    "sequence": {**TENSOR, "enable_sequence_parallel": True},
    "1f1b": PIPELINE,
    "ring": {**CONTEXT, "context_parallel_method": "ring"},
    "all-to-all": {**CONTEXT, "context_parallel_method": "all-to-all"},
    "expert": {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
    "ring+sequence+1f1b": {
        **CONTEXT, **PIPELINE, "context_parallel_method": "ring", "tensor_parallel_degree": 2, "enable_sequence_parallel": True
    },
}  # fmt: skip
WINDOWS = "windows of modernbert"
"""A family that is handed two masks."""
HANDED = ("family bert", "family opt")
"""Families that are handed a mask beside the positions, one without causality and one with."""
MODELS_OF = {
    "one": ("gpt2", "own", "windows of mistral", "windows of gemma2", "family qwen3", WINDOWS, *HANDED),
    "zero3-recompute": ("llama", *HANDED),
    "tp": ("gpt2", "windows of mistral", WINDOWS, *HANDED),
    "sequence": ("llama", *HANDED),
    "1f1b": ("gpt2", "own", WINDOWS, *HANDED),
    "ring": ("llama", "windows of gemma3_text", *HANDED),
    "all-to-all": ("llama", WINDOWS, *HANDED),
    "expert": ("family mixtral",),
    "ring+sequence+1f1b": ("llama", WINDOWS, *HANDED),
}
CASES = [(layout, model) for layout in LAYOUTS for model in MODELS_OF[layout]]
WIDE = {
    ("one", "family qwen3"), ("one", "windows of gemma2"), ("ring+sequence+1f1b", "llama"), ("ring+sequence+1f1b", "windows of modernbert"), ("tp", "gpt2"), ("1f1b", "own"),
    ("tp", WINDOWS), ("1f1b", WINDOWS), ("all-to-all", WINDOWS),
    *((layout, model) for layout in MODELS_OF for model in HANDED),
} - {("ring", "family bert"), ("all-to-all", "family bert"), ("1f1b", "family opt")}  # fmt: skip
"""Parts of the largest product, which the family of two masks goes through, that product on a model that meets its parts, and families
whose masks are made as those of others here."""


class Own(nn.Module):
    """What docs/runtime/models.md asks of a user's own module: it takes positions, and gives its blocks a mask."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(PackedBlock(width, 4) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        order = torch.arange(input_ids.shape[1], device=input_ids.device)
        places = order.expand_as(input_ids) if position_ids is None else position_ids
        document = (places == 0).cumsum(1)
        mask = (document[:, None, :, None] == document[:, None, None, :]) & (order[:, None] >= order)
        x = self.tokens(input_ids) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def own() -> nn.Module:
    torch.manual_seed(0)
    return Own()


WINDOW = {"modernbert": {"local_attention": 8}}


def windows(model_type: str) -> nn.Module:
    """A family in which all blocks or some see a few tokens back alone."""
    torch.manual_seed(0)
    return build(model_type, device="cpu", **WINDOW.get(model_type, {"sliding_window": 4}))


BUILDERS["own"] = own
BUILDERS.update(
    {f"windows of {name}": partial(windows, name) for name in ("mistral", "gemma2", "gemma3_text", "modernbert")}
)


def documents(step: int) -> dict[str, torch.Tensor]:
    """As ``batch``, with a document that begins at every sixth token or so; the first rows hold one document each."""
    data = batch(step)
    generator = torch.Generator().manual_seed(step)
    starts = torch.rand(BATCH, SEQUENCE, generator=generator) < 1 / 6
    starts[:4] = False
    data["labels"][starts] = -100
    place = torch.arange(SEQUENCE)
    return {**data, "position_ids": place - (place * starts).cummax(1).values}


def alone(data: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each document, in the order of the rows."""
    found = []
    for ids, labels, places in zip(data["input_ids"], data["labels"], data["position_ids"], strict=True):
        starts = [int(start) for start in (places == 0).nonzero()]
        for start, end in zip(starts, [*starts[1:], SEQUENCE], strict=True):
            found.append((ids[None, start:end], labels[start:end]))
    return found


def loss_of_documents(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over all scored tokens, of documents that are computed one by one."""
    total, scored = torch.zeros(()), 0
    for ids, labels in alone(data):
        output = model(ids)
        logits = (output if isinstance(output, torch.Tensor) else output.logits)[0]
        if not is_masked(model):
            logits, labels = logits[:-1], labels[1:]
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        scored += int((labels != -100).sum())
    return total / scored


@cache
def plain(name: str) -> dict[str, Any]:
    model = BUILDERS[name]()
    settings = {key: OPTIMIZER[key] for key in ("betas", "weight_decay")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER["learning_rate"], eps=EPS, **settings)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of_documents(model, documents(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"]).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        held_out = loss_of_documents(model, documents(HELD_OUT)).item()
    return {"losses": losses, "norms": norms, "held out": held_out}


def train(rank: int, world: int, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS[model](), {"job": JOB, "parallelism": layout})
    results = [parallel.step(parallel.shard(documents(step))) for step in range(STEPS)]
    held_out = parallel.evaluate([parallel.shard(documents(HELD_OUT))])
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "held out": held_out}


@pytest.mark.parametrize(("layout", "model"), cases(CASES, wide=WIDE))
def test_documents_in_one_sequence_are_as_documents_alone(pool: Pool, layout: str, model: str) -> None:
    results = pool.run(train, world_size(LAYOUTS[layout]), model, LAYOUTS[layout])
    assert_same_curve(results[0], plain(model))
    assert [result["held out"] for result in results] == pytest.approx(
        [plain(model)["held out"]] * len(results), rel=1e-5
    )


def train_compiled(rank: int, world: int, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Everything but the compiler of kernels, which takes long."""
    from ahp.runtime.parallel import parallelize

    with no_kernels() as counted:
        plan = {"job": JOB, "parallelism": layout, "engine": {"compile": True}}
        parallel, results, graphs = parallelize(BUILDERS[model](), plan), [], []
        for step in range(STEPS):
            results.append(parallel.step(parallel.shard(documents(step))))
            graphs.append(counted["unique_graphs"])
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "graphs": graphs}


ZERO_3 = {"data_parallel_shard_degree": 2, "micro_batch_size": 2}
COMPILED: dict[str, tuple[str, dict[str, Any], int]] = {
    "zero3": ("family bert", ZERO_3, 1),
    "sequence": ("llama", LAYOUTS["sequence"], 2),
    "all-to-all": ("family bert", LAYOUTS["all-to-all"], 1),
    "ring": ("family bert", LAYOUTS["ring"], 6),
    "zero3-llama": ("llama", ZERO_3, 1),
    "sequence-bert": ("family bert", LAYOUTS["sequence"], 1),
    "all-to-all-llama": ("llama", LAYOUTS["all-to-all"], 2),
    "ring-llama": ("llama", LAYOUTS["ring"], 10),
    "all-to-all-x-sequence": ("windows of gemma3_text", {**LAYOUTS["all-to-all"], **LAYOUTS["sequence"]}, 2),
    "1f1b-selective": ("gpt2", {**PIPELINE, "activation_checkpoint": "selective"}, 2),
    "zero-x-tp-1f1b-recompute": ("family opt", {**ZERO_3, **TENSOR, **PIPELINE, "activation_checkpoint": "full"}, 1),
    "expert": ("family mixtral", LAYOUTS["expert"], 4),
    "zero3-recompute-windows": (WINDOWS, LAYOUTS["zero3-recompute"], 2),
}
"""The model, the layout, and how many graphs there are: those of a block (tests/runtime/compute/test_compile.py), and twice as many where a
rank has micro-batches of one document in each row besides, for which transformers makes no mask."""
FEW = ("sequence",)
"""Beside zero3 by lengths (test_document_attention.py)."""


@pytest.mark.parametrize("case", cases(COMPILED, wide=set(COMPILED) - set(FEW)))
def test_compiled_blocks_keep_documents_apart(pool: Pool, case: str) -> None:
    model, layout, graphs = COMPILED[case]
    skip_where_slices_do_not_compile(layout)
    for found in pool.run(train_compiled, world_size(layout), model, layout):
        assert_same_curve(found, plain(model))
        assert found["graphs"] == [graphs] * STEPS, "compiled after the first step, or in another number of parts"


def test_without_the_mask_the_curve_is_another() -> None:
    """So that the tests above could fail."""
    model, data = BUILDERS["gpt2"](), documents(0)
    logits = model(input_ids=data["input_ids"]).logits
    joined = F.cross_entropy(logits[:, :-1].flatten(0, 1), data["labels"][:, 1:].flatten(), ignore_index=-100)
    assert abs(joined.item() / plain("gpt2")["losses"][0] - 1) > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_verify_compares_with_masks_too() -> None:
    from ahp.plan import Plan
    from ahp.runtime.check.verify import verify

    model = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    job = {**JOB, "sequence_length": 32, "global_batch_size": 4}
    plan = Plan.model_validate({"model": model, "job": job, "parallelism": {"tensor_parallel_degree": 2}})
    assert [step.equal for step in verify(plan, steps=2)] == [True, True]


@pytest.mark.parametrize(
    ("job", "key", "words"),
    [
        (JOB, "labels", r"document_mask True its keys must be input_ids, labels and position_ids"),
        (CALM, "position_ids", r"document_mask False its keys must be input_ids and labels"),
    ],
)
def test_a_batch_has_the_keys_that_the_job_asks_for(job: dict[str, Any], key: str, words: str) -> None:
    from ahp.errors import BadInput
    from ahp.job import Job
    from ahp.runtime.part import check_part

    with pytest.raises(BadInput, match=words):
        check_part({name: torch.zeros(1, 2) for name in ("input_ids", "labels", key)}, Job.model_validate(job), 1)
