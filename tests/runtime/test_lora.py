"""job.lora: every layout trains the adapters that peft trains on one process, and nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ahp.plan import Plan, validated
from ahp.runtime.check.verify import verify
from tests.marks import cases
from tests.runtime.compute import test_bf16
from tests.runtime.models import BUILDERS, JOB, MODELS, batch, reference
from tests.runtime.test_equality import (
    LAYOUTS,
    PIPELINE,
    SEQUENCE,
    SPLIT,
    TENSOR,
    ZERO,
    assert_same_curve,
    assert_same_weights,
    train,
    world_size,
)
from tests.runtime.workers import Pool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft (the extra lora) is not installed"
)

STEPS = 4
"""The first changes one of an adapter's two factors alone: the other is zero before it."""
RANK, ALPHA = 4, 8
TARGETS: dict[str, Any] = {"custom": ["qkv", "out", "up", "down"], "gpt2": "all-linear", "llama": "all-linear"}


def by_peft(name: str) -> nn.Module:
    """The model as peft makes it, with the seed of the job."""
    from peft import LoraConfig, inject_adapter_in_model

    module = MODELS[name]()
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2")
    return inject_adapter_in_model(config, module)


BUILDERS.update({f"peft {name}": lambda name=name: by_peft(name) for name in MODELS})

MORE: dict[str, dict[str, Any]] = {
    "context": {"context_parallel_degree": 2, "micro_batch_size": 4},
    "zero1+context": {**ZERO["zero1"], "context_parallel_degree": 2, "context_parallel_method": "all-to-all"},
    "tp+zero3+1f1b": {**TENSOR["tp"], **ZERO["zero3"], **PIPELINE["1f1b"], "micro_batch_size": 2},
    "sequence+zbv": {**SEQUENCE["sequence"], **SPLIT["zbv"], "micro_batch_size": 2},
}
ALL = {**LAYOUTS, **MORE}
CASES = [(layout, tuple(MODELS)[turn % len(MODELS)]) for turn, layout in enumerate(ALL)]
"""The models take turns."""
FAST = [("zero1", "gpt2"), ("zero3", "llama")]
SLOW = ("zero2", "tp", "zbv", "tp-selective", "zero0-uneven", "zero1+context", "sequence+zbv", "tp+zero3+1f1b")
WIDE = [case for case in CASES if case[0] not in SLOW and case not in FAST]


def lora(name: str) -> dict[str, Any]:
    return {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS[name]}


@pytest.mark.parametrize(
    ("layout", "model"), cases([*FAST, *(c for c in CASES if c not in FAST)], fast=FAST, wide=WIDE)
)
def test_layout_equals_peft_on_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str, model: str
) -> None:
    results = pool.run(train, world_size(ALL[layout]), model, ALL[layout], STEPS, {**JOB, "lora": lora(model)})
    expected = plain_run(f"peft {model}", STEPS)
    for result in results:
        assert (result["losses"], result["norms"]) == (results[0]["losses"], results[0]["norms"])
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


@pytest.mark.parametrize("layout", ["tp", pytest.param("sequence", marks=pytest.mark.slow)])
def test_blocks_that_begin_with_a_product_sum_its_gradient(pool: Pool, layout: str) -> None:
    """No norm with a weight comes before it, and into the first block no gradient goes back: its graph is not that of the others."""
    job = {**JOB, "lora": {"r": RANK, "lora_alpha": ALPHA}}
    split, alone = (
        pool.run(train, world_size(LAYOUTS[name]), "family olmo2", LAYOUTS[name], STEPS, job)
        for name in (layout, "one")
    )
    assert_same_curve(split[0], alone[0])
    assert_same_weights(split, alone[0])


def begin(rank: int, world: int, folder: str, layout: dict[str, Any], left: str) -> dict[str, Any]:
    """Start from given weights, leave the adapters as they begin, take two steps, and leave a checkpoint."""
    parallel = from_folder(folder, layout)
    parallel.export_hf(f"{left}/begun")
    found = steps_of(parallel, range(2))
    parallel.save(f"{left}/checkpoint")
    trained = {name for name, p in parallel.parameters.items() if p.requires_grad}
    assert set(parallel.state.optimizer.shards) == trained == {n for n in parallel.parameters if ".lora_" in n}
    return found


def go_on(rank: int, world: int, folder: str, layout: dict[str, Any], left: str) -> dict[str, Any]:
    parallel = from_folder(folder, layout, initialize=False)
    parallel.load(f"{left}/checkpoint")
    found = steps_of(parallel, range(2, 4))
    parallel.export_hf(f"{left}/hf")
    return found


def from_folder(folder: str, layout: dict[str, Any], *, initialize: bool = True) -> Any:
    from ahp.graph.models import build_model
    from ahp.runtime.parallel import parallelize

    module = build_model(folder, device="meta")
    plan = {"job": {**JOB, "lora": lora("llama")}, "parallelism": layout, "init_from": folder}
    return parallelize(module, plan, initialize=initialize)


def steps_of(parallel: Any, steps: range) -> dict[str, Any]:
    results = [parallel.step(parallel.shard(batch(step))) for step in steps]
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "first", "second"),
    [("llama", "zero3+tp", "zero1"), ("gpt2", "tp+1f1b", "one")],
)
def test_from_given_weights_to_files_that_peft_loads(
    pool: Pool, tmp_path: Path, model: str, first: str, second: str
) -> None:
    """Begun under one layout and ended under another, the adapters are those that peft trains from the same beginning."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = MODELS[model]()
    base.save_pretrained(tmp_path / "base")
    order = str(tmp_path / "base"), str(tmp_path)
    found = [
        pool.run(function, world_size(LAYOUTS[layout]), order[0], LAYOUTS[layout], order[1])[0]
        for function, layout in ((begin, first), (go_on, second))
    ]

    def by_peft(adapter: str, **more: Any) -> Any:
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(order[0]), tmp_path / adapter, **more)

    trained = by_peft("begun/adapter", is_trainable=True)
    with mock.patch.dict(BUILDERS, {"given": lambda: trained.train()}):
        expected = reference("given", 4)
    assert_same_curve({key: found[0][key] + found[1][key] for key in ("losses", "norms")}, expected)

    ids = batch(0)["input_ids"]
    with torch.no_grad():
        logits = trained.eval()(input_ids=ids).logits
        started = base.eval()(input_ids=ids).logits
        assert (logits - started).abs().max() > 1e-3
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        for ended in (by_peft("hf/adapter"), merged):
            torch.testing.assert_close(ended.eval()(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)


def kinds(rank: int, world: int, layout: dict[str, Any]) -> dict[bool, set[torch.dtype]]:
    """In which types the trained and the frozen weights are held."""
    from ahp.runtime.parallel import parallelize

    job = {**JOB, "precision": "bf16", "lora": lora("llama")}
    parallel = parallelize(MODELS["llama"](), {"job": job, "parallelism": layout})
    return {
        which: {p.dtype for p in parallel.parameters.values() if p.requires_grad is which} for which in (True, False)
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "zero3+tp"])
def test_only_what_is_trained_has_a_copy_in_fp32(pool: Pool, layout: str) -> None:
    for found in pool.run(kinds, world_size(LAYOUTS[layout]), LAYOUTS[layout]):
        assert found == {True: {torch.float32}, False: {torch.bfloat16}}


def copied(rank: int, world: int, layout: dict[str, Any], engine: dict[str, Any]) -> tuple[dict[str, Any], set[bool]]:
    """Two steps' losses and norms, and of the weights that FSDP makes copies of, whether they are trained."""
    from torch.distributed.tensor import DTensor

    from ahp.runtime.parallel import parallelize

    job = {**JOB, "precision": "bf16", "lora": lora("llama")}
    parallel = parallelize(MODELS["llama"](), {"job": job, "parallelism": layout, "engine": engine})
    return steps_of(parallel, range(2)), {
        p.requires_grad for p in parallel.parameters.values() if isinstance(p, DTensor)
    }


@pytest.mark.parametrize("engine", [{}, {"loss_chunk_tokens": 8}], ids=["eager", "chunks"])
def test_frozen_weights_have_no_copy_where_no_ranks_share_them(pool: Pool, engine: dict[str, Any]) -> None:
    alone, replicated, sharded = (
        pool.run(copied, world_size(LAYOUTS[layout]), LAYOUTS[layout], engine) for layout in ("one", "zero0", "zero3")
    )
    assert [which for _, which in (alone[0], replicated[0], sharded[0])] == [{True}, {True}, {True, False}]
    for found, _ in (*replicated, *sharded):
        assert found["losses"] == pytest.approx(alone[0][0]["losses"], rel=test_bf16.FIRST)
        assert found["norms"] == pytest.approx(alone[0][0]["norms"], rel=test_bf16.FIRST)


@pytest.mark.parametrize("layout", cases(["zero3", "tp", "1f1b", "zero0"], wide=["zero3", "1f1b"]))
def test_layouts_in_bf16_stay_within_rounding(pool: Pool, layout: str) -> None:
    parallelism = {**LAYOUTS[layout], "micro_batch_size": test_bf16.MICRO}
    optimizer = {**JOB["optimizer"], "learning_rate": test_bf16.RATE}
    job = {**JOB, "precision": "bf16", "optimizer": optimizer, "lora": lora("llama")}
    got = pool.run(train, world_size(parallelism), "llama", parallelism, test_bf16.STEPS, job)[0]
    for step, (loss, norm) in enumerate(test_bf16.plain("peft llama")):
        allowed = test_bf16.FIRST + (test_bf16.LAST - test_bf16.FIRST) * step / 19
        assert got["losses"][step] == pytest.approx(loss, rel=allowed)
        assert got["norms"][step] == pytest.approx(norm, rel=allowed)


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_ahp_verify_compares_adapters_with_adapters() -> None:
    keys = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    job = {"sequence_length": 16, "global_batch_size": 4, "steps": 4, "precision": "fp32", "lora": {"r": RANK}}
    layout = {"tensor_parallel_degree": 2, "micro_batch_size": 2}
    plan = validated(Plan, {"model": {"model_type": "llama", **keys}, "job": job, "parallelism": layout}, "plan")
    found = verify(plan, steps=3)
    assert [one.step for one in found] == [1, 2, 3]
    assert all(one.equal for one in found)
