"""``job.dtype: bf16``: weights, gradients and moments in bf16. Every layout stays within bf16's own rounding of one process in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ahp.errors import BadInput
from ahp.job import Job
from ahp.runtime.parallel import parallelize
from tests.marks import cases
from tests.runtime.compute.test_bf16 import CONTEXT, EVERY, FIRST, LAST, MICRO, RATE, STEPS, TYPICAL
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, SEQUENCE, VOCABULARY, batch
from tests.runtime.test_equality import LAYOUTS, train, world_size
from tests.runtime.workers import Pool

IN_16_BITS: dict[str, Any] = {
    **JOB,
    "precision": "bf16",
    "dtype": "bf16",
    "optimizer": {**OPTIMIZER, "learning_rate": RATE},
}


def plain(name: str) -> Iterator[tuple[float, float]]:
    """A model whose parameters are in bf16, and AdamW's fused kernel, in the layouts' micro-batches."""
    model = BUILDERS[name]()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=RATE,
        betas=OPTIMIZER["betas"],
        eps=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"],
        fused=True,
    )
    for step in range(STEPS):
        data = batch(step)
        scored, total = (data["labels"][:, 1:] != -100).sum(), 0.0
        for ids, labels in zip(data["input_ids"].split(MICRO), data["labels"].split(MICRO), strict=True):
            output = model(ids)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            scores = logits[:, : SEQUENCE - 1].reshape(-1, VOCABULARY).float()
            loss = F.cross_entropy(scores, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum") / scored
            loss.backward()
            total += loss.item()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.double().norm() for g in gradients]).norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), OPTIMIZER["grad_clip"], norm.float())
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    cases(
        [("llama", (*TYPICAL, "zero0", "zero2")), ("llama", EVERY), ("gpt2", TYPICAL)],
        wide=[("llama", EVERY), ("gpt2", TYPICAL)],
    ),
)
def test_layouts_stay_within_rounding(pool: Pool, model: str, layouts: tuple[str, ...]) -> None:
    expected = list(plain(model))
    for layout in layouts:
        parallelism = {**(LAYOUTS | CONTEXT)[layout], "micro_batch_size": MICRO}
        got = pool.run(train, world_size(parallelism), model, parallelism, STEPS, IN_16_BITS)[0]
        for step, (loss, norm) in enumerate(expected):
            allowed = FIRST + (LAST - FIRST) * step / 19
            assert got["losses"][step] == pytest.approx(loss, rel=allowed), f"{layout}, loss of step {step}"
            assert got["norms"][step] == pytest.approx(norm, rel=allowed), f"{layout}, norm of step {step}"


def _held(rank: int, world: int, layout: dict[str, Any], folder: str, load: bool) -> dict[str, Any]:
    parallel = parallelize(
        BUILDERS["llama"](), {"job": IN_16_BITS, "parallelism": {**layout, "micro_batch_size": MICRO}}
    )
    if load:
        parallel.load(folder)
    results = [parallel.step(parallel.shard(batch(step))) for step in ((2, 3) if load else range(4))]
    optimizer = parallel.state.optimizer
    moments = [t for name in optimizer.shards for key, t in optimizer.moments(name).items() if key != "step"]
    types = {str(t.dtype) for t in (*parallel.parameters.values(), *moments)}
    return {"losses": [one.loss for one in results], "norms": [one.grad_norm for one in results], "types": types}


def _saved(rank: int, world: int, layout: dict[str, Any], folder: str) -> None:
    parallel = parallelize(
        BUILDERS["llama"](), {"job": IN_16_BITS, "parallelism": {**layout, "micro_batch_size": MICRO}}
    )
    for step in range(2):
        parallel.step(parallel.shard(batch(step)))
    parallel.save(folder)


@pytest.mark.slow
def test_everything_is_in_16_bits_and_goes_on_under_another_plan(pool: Pool, tmp_path: Path) -> None:
    through = pool.run(_held, 2, LAYOUTS["zero3"], "", False)[0]
    pool.run(_saved, 2, LAYOUTS["zero3"], str(tmp_path / "saved"))
    after = pool.run(_held, 2, LAYOUTS["tp"], str(tmp_path / "saved"), True)[0]
    assert through["types"] == after["types"] == {"torch.bfloat16"}
    assert after["losses"] == pytest.approx(through["losses"][2:], rel=FIRST)
    assert after["norms"] == pytest.approx(through["norms"][2:], rel=FIRST)


def _other(rank: int, world: int, folder: str) -> str:
    parallel = parallelize(BUILDERS["llama"](), {"job": {**IN_16_BITS, "dtype": "fp32"}, "parallelism": {}})
    with pytest.raises(BadInput) as refused:
        parallel.load(folder)
    return str(refused.value)


@pytest.mark.slow
def test_states_of_another_type_are_not_taken(pool: Pool, tmp_path: Path) -> None:
    pool.run(_saved, 1, {}, str(tmp_path / "saved"))
    said = pool.run(_other, 1, str(tmp_path / "saved"))[0]
    assert "has the type torch.bfloat16 there, and torch.float32 here" in said


@pytest.mark.parametrize(
    ("key", "value"), [("precision", "fp16"), ("precision", "fp32"), ("optimizer", "muon"), ("lora", {"r": 4})]
)
def test_what_does_not_go_with_it_is_refused(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=r"does not go with job\.dtype bf16: .* or job\.dtype fp32"):
        Job(**{"dtype": "bf16", key: value})
