"""Runs that stop and go on, drawn at random: family, precision, optimizer, step of the stop, layout and next layout."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ahp.divisors import divisors
from ahp.engines import registry
from ahp.engines.ahp import BLOCK_OF_8_BITS
from ahp.errors import BadInput
from ahp.forecast import rules
from ahp.plan import AXES, DEGREE, Plan, validated
from ahp.schedule.registry import SCHEDULES, get
from tests.runtime.restarts import BATCH, SEQUENCE, STEPS, VOCABULARY, Restart

MOST_RANKS = 6
LAYERS = 6
HEADS, HEAD_WIDTH = 6, 8
WIDTH = HEADS * HEAD_WIDTH

OVERFLOWING = 2.0**22
"""A loss scale at which gradients of these models overflow, so that the first steps are left out."""
SMALL = 2.0**10
"""One at which none does, and which is not the one that a run starts with."""


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 60, "head_dim": HEAD_WIDTH, **more}
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=SEQUENCE,
        attn_implementation="sdpa", **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=SEQUENCE, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def experts(family: str, **more: Any) -> nn.Module:
    from tests.search.families import build

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_WIDTH}
    return build(family, device="cpu", vocab_size=VOCABULARY, num_hidden_layers=LAYERS, **{**sizes, **more})


def plain(name: str) -> nn.Module:
    from tests.runtime.models import BUILDERS

    return BUILDERS[name]()


def draw(seed: int | str, *, eight_bit: bool = False) -> Restart:
    """The same for the same seed. Its layouts are legal by what is known before the model is looked at. ``eight_bit``: with moments in 8 bits."""
    d = random.Random(seed)
    every = ["llama"] * 3 + ["gpt2"] * 3 + ["mixtral"] * 3 + ["qwen3_moe", "custom", "biased"]
    family = d.choice([each for each in every if not eight_bit or each in WIDE])
    num_experts = d.choice([2, 4, 6]) if family in ("mixtral", "qwen3_moe") else 1
    precision = d.choice(["fp32", "fp32", "fp32", "bf16", "fp16"])
    dropout = 0.1 if family == "gpt2" and d.random() < 0.3 else 0.0
    muon = d.random() < 0.3 and not eight_bit
    job: dict[str, Any] = {"precision": precision}
    if family in ("llama", "gpt2", "mixtral") and d.random() < 0.25:
        job["document_mask"] = True
    engine = {"loss_chunk_tokens": 7} if d.random() < 0.2 else {}
    # Dropout depends on the layout; which expert takes a token, on a rounding that 16 bits make large.
    same = dropout > 0 or (precision != "fp32" and num_experts > 1) or d.random() < 0.2
    # At which scale gradients overflow depends on what a rank adds up.
    scale = (OVERFLOWING if same else SMALL) if precision == "fp16" and d.random() < 0.7 else None
    restart = Restart(
        _build(d, family, num_experts, dropout), {}, {}, d.randint(1, STEPS - 3), _optimizer(d, muon=muon), job, engine, scale
    )  # fmt: skip
    if eight_bit:
        restart = in_eight_bits(restart)
    layers = {"custom": 5, "biased": 4}.get(family, LAYERS)
    first = _layout(d, restart, layers, num_experts)
    then = first if same else _layout(d, restart, layers, num_experts)
    if "output_router_logits" in restart.build.keywords:  # each micro-batch has a balance loss of its own
        while then["micro_batch_size"] != first["micro_batch_size"]:
            then = _layout(d, restart, layers, num_experts)
    return replace(restart, first=first, then=then)


WIDE = ("llama", "mixtral", "qwen3_moe")
"""Families whose weights can have blocks of moments in 8 bits."""


def in_eight_bits(restart: Restart) -> Restart:
    """The same, with moments in 8 bits for the weights after attention and in the middle of an MLP: they have six blocks in a row."""
    assert isinstance(restart.build, partial)
    middle = "moe_intermediate_size" if restart.build.args == ("qwen3_moe",) else "intermediate_size"
    build = partial(restart.build, **{middle: HEADS * BLOCK_OF_8_BITS, "head_dim": BLOCK_OF_8_BITS})
    return replace(restart, build=build, optimizer={**restart.optimizer, "name": "adamw8bit"})


def work(restart: Restart) -> float:
    """Micro-batches that both layouts compute. A micro-batch that is divided over ranks counts once for each rank, and recompute adds half."""

    def passes(layout: dict[str, Any]) -> float:
        parts = layout.get(DEGREE["tp"], 1) * layout.get(DEGREE["cp"], 1)
        again = 1.0 if layout["activation_checkpoint"] == "none" else 1.5
        return BATCH / layout["micro_batch_size"] * parts * again

    return passes(restart.first) + passes(restart.then)


def items(restart: Restart) -> set[str]:
    """What a draw tries, of what a restart has to get right."""
    build = restart.build if isinstance(restart.build, partial) else partial(restart.build)
    both, words = (restart.first, restart.then), build.keywords
    num_experts = words.get("num_local_experts", words.get("num_experts", 0))
    shards = [layout.get(DEGREE["dp_shard"], 1) * layout.get(DEGREE["cp"], 1) for layout in both]
    degrees = {layout.get(DEGREE[axis], 1) for layout in both for axis in AXES}
    parts = [layout.get("expert_parallel_degree", 1) for layout in both]
    gpt = build.func is gpt2
    found = {
        "another layout": restart.first != restart.then,
        "more shards than rows": 0 < num_experts < max(shards),
        "a degree of 3": 3 in degrees,
        "a degree of 6": 6 in degrees,
        "experts into another layout": num_experts > 0 and parts[0] != parts[1],
        "Muon beside experts": num_experts > 0 and restart.optimizer.get("name") == "muon",
        "the scale of fp16": restart.loss_scale is not None,
        "dropout": gpt and build.args[0] > 0,
        "packed documents": restart.job.get("document_mask", False),
        "accumulation": any(map(_accumulates, both)),
        "tied weights": gpt or words.get("tie_word_embeddings", False),
        "uneven stages": any(len(set(layout.get("layers_per_stage", ()))) > 1 for layout in both),
        "uneven replicas": any(len(set(layout.get("micro_batches_per_replica", ()))) > 1 for layout in both),
    }
    return {name for name, tried in found.items() if tried}


ITEMS = (
    "another layout", "more shards than rows", "a degree of 3", "a degree of 6", "experts into another layout", "Muon beside experts",
    "the scale of fp16", "dropout", "packed documents", "accumulation", "tied weights", "uneven stages", "uneven replicas",
)  # fmt: skip


def _accumulates(layout: dict[str, Any]) -> bool:
    ranks = layout.get(DEGREE["dp_replicate"], 1) * layout.get(DEGREE["dp_shard"], 1)
    return BATCH // ranks > layout["micro_batch_size"]


def _build(d: random.Random, family: str, num_experts: int, dropout: float) -> partial[nn.Module]:
    if family == "llama":
        return partial(llama, num_key_value_heads=d.choice([1, 2, 3, 6]), tie_word_embeddings=d.random() < 0.5)
    if family == "gpt2":
        return partial(gpt2, dropout)
    if num_experts == 1:
        return partial(plain, family)
    key = "num_local_experts" if family == "mixtral" else "num_experts"
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.1} if d.random() < 0.3 else {}
    return partial(experts, family, **{key: num_experts}, **balance)


def _optimizer(d: random.Random, *, muon: bool) -> dict[str, Any]:
    schedule = d.choice(["constant", "linear", "cosine", "wsd"])
    found: dict[str, Any] = {
        "schedule": schedule,
        "warmup_steps": d.choice([0, 1, 3]),
        "decay_norms_and_biases": d.random() < 0.5,
        "weight_decay": d.choice([0.0, 0.1]),
        "grad_clip": d.choice([None, 0.5]),
    }
    if schedule == "wsd":
        found["decay_share"] = 0.5
    if muon:
        found |= {"name": "muon", "momentum": d.choice([0.8, 0.95])}
    return found


def _layout(d: random.Random, restart: Restart, layers: int, num_experts: int) -> dict[str, Any]:
    """One that no rule refuses that needs no model."""
    while True:
        layout = _any_layout(d, layers, num_experts)
        try:
            plan = validated(Plan, restart.plan(layout), "plan")
        except BadInput:
            continue
        p, job = plan.parallelism, plan.job
        refused = (
            registry.get("ahp").refuses(job, p, plan.engine)
            or rules.batch(job, p)
            or rules.sequence(job, p)
            or rules.schedules(job, p, in_torch=False)
        )
        if not refused:
            return layout


def _any_layout(d: random.Random, layers: int, num_experts: int) -> dict[str, Any]:
    left = d.choice([1, 2, 3, 4, 6, 6])
    assert left <= MOST_RANKS
    degrees: dict[str, int] = {}
    axes = [DEGREE[axis] for axis in AXES]
    for axis in d.sample(axes, len(axes)):
        degrees[axis] = d.choice(divisors(left))
        left //= degrees[axis]
    degrees[d.choice(axes)] *= left
    pipeline, replicas, shards, context, tensor = (degrees[axis] for axis in axes)
    layout: dict[str, Any] = {key: degree for key, degree in degrees.items() if degree > 1}
    if shards * context > 1:
        layout["zero_stage"] = d.choice([1, 2, 3] if shards > 1 else [0, 1, 3])
    if tensor > 1:
        layout["enable_sequence_parallel"] = d.random() < 0.5
    if context > 1:
        layout["context_parallel_method"] = d.choice(["ring", "all-to-all", None])
    if num_experts > 1 and shards * context > 1:
        layout["expert_parallel_degree"] = d.choice(divisors(num_experts))
    if pipeline > 1:
        layout |= _pipeline(d, pipeline, layers)
    layout["micro_batch_size"] = d.choice([1, 2, 3])
    if replicas > 1 and d.random() < 0.4:
        each = BATCH // (shards * layout["micro_batch_size"])
        cuts = sorted(d.sample(range(1, max(each, replicas + 1)), replicas - 1))
        layout["micro_batches_per_replica"] = [b - a for a, b in zip([0, *cuts], [*cuts, each], strict=True)]
    layout["activation_checkpoint"] = d.choice(["none", "none", "selective", "full"])
    if d.random() < 0.2:
        held = [axis for axis in AXES if degrees[DEGREE[axis]] > 1]
        layout["mesh_order"] = d.sample(held, len(held))
    return layout


def _pipeline(d: random.Random, degree: int, layers: int) -> dict[str, Any]:
    schedule = d.choice(list(SCHEDULES))
    most = get(schedule).most_virtual
    virtual = d.choice([1, 2]) if most is None else most
    found: dict[str, Any] = {"pipeline_parallel_schedule": schedule, "virtual_stages_per_rank": virtual}
    if (stages := degree * virtual) < layers and d.random() < 0.4:
        cuts = sorted(d.sample(range(1, layers), stages - 1))
        found["layers_per_stage"] = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    return found
