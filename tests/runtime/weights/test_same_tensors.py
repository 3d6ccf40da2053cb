"""A checkpoint of another model or job is refused in words, by every rank, and changes nothing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ahp.runtime.torch_compat import local_tensor
from tests.marks import cases
from tests.runtime.models import JOB, OPTIMIZER, batch
from tests.runtime.workers import Pool

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"data_parallel_shard_degree": 2, "micro_batch_size": 4},
    "1f1b": {"pipeline_parallel_degree": 2, "micro_batch_size": 4},
}
MUON, FP16 = {"optimizer": {**OPTIMIZER, "name": "muon"}}, {"precision": "fp16"}
ADAPTERS = {"lora": {"r": 2}}
UNUSED, MISSING = "which would not be used", "it has no "
FROZEN = "model.layers.1.mlp.up_proj.weight"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fewer layers": ({"num_hidden_layers": 3}, {}, UNUSED),
    "more layers": ({}, {"num_hidden_layers": 3}, MISSING),
    "tied now": ({}, {"tie_word_embeddings": True}, f"it has model.lm_head.weight, {UNUSED}"),
    "tied before": ({"tie_word_embeddings": True}, {}, "it has no .*lm_head.weight"),
    "wider": ({}, {"intermediate_size": 64}, r"has the shape \[.*\] there, and \[.*64.*\] here"),
    "muon now": ({}, MUON, "job.optimizer.name = 'muon': it was written under adamw"),
    "muon before": (MUON, {}, "job.optimizer.name = 'adamw': it was written under muon"),
    "fp16 now": ({}, FP16, "job.precision = 'fp16': it has no scale of the loss"),
    "frozen before": ({"frozen": FROZEN}, {}, f"{FROZEN} was frozen there, and has no state of the optimizer"),
    "adapters now": ({}, ADAPTERS, "job.lora: it was written without adapters"),
    "adapters before": (ADAPTERS, {}, "job.lora: it was written with adapters"),
}
"""What the model or the job had when it was saved, what it has now, and what is told."""


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 64, "tie_word_embeddings": False, **more}))  # fmt: skip


def begun(has: dict[str, Any], layout: dict[str, Any]) -> Any:
    from ahp.runtime.parallel import parallelize

    job = {key: has[key] for key in ("optimizer", "precision", "lora") if key in has}
    module = llama(**{key: value for key, value in has.items() if key not in (*job, "frozen")})
    if "frozen" in has:
        module.get_parameter(has["frozen"]).requires_grad_(False)
    return parallelize(module, {"job": {**JOB, **job}, "parallelism": layout})


def saved_and_loaded(
    rank: int, world: int, before: dict[str, Any], now: dict[str, Any], layout: dict[str, Any], folder: str
) -> list[str]:
    from ahp.errors import BadInput

    first = begun(before, layout)
    first.step(first.shard(batch(0)))
    first.save(folder)
    parallel, told = begun(now, layout), []
    held = {name: local_tensor(p.detach()).clone() for name, p in parallel.parameters.items()}
    of_states = {"optimizer", "precision", "frozen"}
    for weights_alone in (False, True):
        if weights_alone and {*before, *now} <= of_states:  # the weights are of one model
            parallel.load(folder, weights_alone=True)
            continue
        with pytest.raises(BadInput) as error:
            parallel.load(folder, weights_alone=weights_alone)
        told.append(str(error.value))
        assert parallel.num_steps_done == 0
        assert all(torch.equal(local_tensor(p.detach()), held[name]) for name, p in parallel.parameters.items())
    return told


OF_STAGES = ("fewer layers", "more layers", "tied now")
"""What one stage may know and another not: the rest is told alike, and repeated on stages at length only."""


@pytest.mark.parametrize(
    ("case", "layout"),
    cases(
        [(case, layout) for case in CASES for layout in ("1f1b", "zero3")],
        wide=[(case, "1f1b") for case in CASES if case not in OF_STAGES],
    ),
)
def test_what_does_not_fit_is_told(pool: Pool, tmp_path: Path, case: str, layout: str) -> None:
    before, now, rule = CASES[case]
    if "lora" in {**before, **now} and importlib.util.find_spec("peft") is None:
        pytest.skip("peft (the extra lora) is not installed")
    found = pool.run(saved_and_loaded, 2, before, now, LAYOUTS[layout], str(tmp_path))
    assert found[0] == found[1]
    for said in found[0]:
        assert said.startswith(f"folder = '{tmp_path}': holds a checkpoint of another model or job: ")
    assert re.search(rule, found[0][0])
