"""bf16 with fp32 master weights: every layout stays within bf16's own rounding of one process in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, SEQUENCE, VOCABULARY, Block, Custom, batch
from tests.runtime.test_equality import LAYOUTS, train, world_size
from tests.runtime.workers import Pool

STEPS = 10
MICRO = 2
RATE = 3e-4
"""Lower than in fp32: one flipped rounding is 4e-3 of a weight, and a high rate makes another curve of it."""
FIRST, LAST = 2e-3, 1e-2
"""Relative, at the first and at the twentieth step. Half a unit in the last place of bf16's 8 bits is 2e-3; layouts add up in
another order, and the steps of AdamW carry the difference on."""


def plain(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    scaler: torch.amp.GradScaler | None = None,
    eps: float = OPTIMIZER["eps"],
) -> Iterator[tuple[float, float]]:
    """Weights are cast on their way into the forward, so that gradients arrive at fp32 masters, in the layouts' micro-batches. A
    masked model's labels are not shifted."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    model = BUILDERS[name]()
    first = 0 if "ForMaskedLM" in type(model).__name__ else 1
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=RATE,
        betas=OPTIMIZER["betas"],
        eps=eps,
        weight_decay=OPTIMIZER["weight_decay"],
    )
    for step in range(STEPS):
        data = batch(step)
        cast = {n: p.to(dtype) for n, p in parameters.items()}
        scored = (data["labels"][:, first:] != -100).sum()
        total = 0.0
        for ids, labels in zip(data["input_ids"].split(MICRO), data["labels"].split(MICRO), strict=True):
            output = functional_call(model, cast, (ids,))
            logits = output if isinstance(output, torch.Tensor) else output.logits
            scores = logits[:, : SEQUENCE - first].reshape(-1, VOCABULARY).float()
            loss = F.cross_entropy(scores, labels[:, first:].reshape(-1), ignore_index=-100, reduction="sum") / scored
            scaler.scale(loss).backward(retain_graph=True)
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield total, norm.item()


class InFp32(Block):
    """Its hidden states are in fp32, as Mamba's residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.out.weight.dtype)).float()


class Residual(Custom):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.tokens(input_ids) + self.positions[: input_ids.shape[1]])
        return self.head(self.norm(x.to(self.norm.weight.dtype)).to(self.head.weight.dtype))


def residual() -> nn.Module:
    torch.manual_seed(0)
    module = Residual(layers=0)
    module.blocks = nn.Sequential(*(InFp32(32, 4) for _ in range(4)))
    return module


BUILDERS["residual in fp32"] = residual
CONTEXT = {
    method: {"context_parallel_degree": 2, "context_parallel_method": method} for method in ("ring", "all-to-all")
}
EVERY = (
    "one", "zero0", "zero1", "zero2", "zero3", "tp", "1f1b", "zero3-x-tp-x-interleaved", "zero-bubble", *CONTEXT,
)  # fmt: skip
TYPICAL = ("zero3", "tp", "1f1b", "ring")
"""What casts differently: gathered weights, split weights, weights of a stage. That the other layouts cast as these
do is seen on one model."""


@pytest.mark.parametrize(
    ("model", "layouts"),
    cases(
        [
            ("llama", TYPICAL),
            ("gpt2", TYPICAL),
            ("llama", EVERY),
            ("custom", TYPICAL),
            ("residual in fp32", ("1f1b", "tp")),
        ],
        wide=[("gpt2", TYPICAL), ("llama", EVERY), ("custom", TYPICAL)],
    ),
)
def test_layouts_stay_within_rounding(pool: Pool, model: str, layouts: tuple[str, ...]) -> None:
    expected = list(plain(model))
    job: dict[str, Any] = {**JOB, "precision": "bf16", "optimizer": {**OPTIMIZER, "learning_rate": RATE}}
    for layout in layouts:
        parallelism = {**(LAYOUTS | CONTEXT)[layout], "micro_batch_size": MICRO}
        got = pool.run(train, world_size(parallelism), model, parallelism, STEPS, job)[0]
        for step, (loss, norm) in enumerate(expected):
            allowed = FIRST + (LAST - FIRST) * step / 19
            assert got["losses"][step] == pytest.approx(loss, rel=allowed), f"{layout}, loss of step {step}"

            assert got["norms"][step] == pytest.approx(norm, rel=allowed), f"{layout}, norm of step {step}"
