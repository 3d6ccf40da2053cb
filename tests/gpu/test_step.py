"""Steps on a GPU beside plain PyTorch on the same device: the same loss and gradient norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, SEQUENCE, VOCABULARY, batch

STEPS = 6
TOLERANCE = 1e-4
"""fp32 without TF32; sums in another order."""


def plain(name: str, device: torch.device) -> list[tuple[float, float]]:
    model = BUILDERS[name]().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER["learning_rate"], betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"],
    )  # fmt: skip
    found = []
    for step in range(STEPS):
        data = {key: value.to(device) for key, value in batch(step).items()}
        output = model(data["input_ids"])
        logits = output if isinstance(output, torch.Tensor) else output.logits
        loss = F.cross_entropy(
            logits[:, : SEQUENCE - 1].reshape(-1, VOCABULARY).float(),
            data["labels"][:, 1:].reshape(-1),
            ignore_index=-100,
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.parametrize("engine", [{}, {"compile": True}], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", [{}, {"micro_batch_size": 2, "activation_checkpoint": "selective"},
                                    {"micro_batch_size": 2, "activation_checkpoint": "full"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("model", sorted(BUILDERS))
def test_steps_equal_plain_pytorch(
    model: str, layout: dict[str, Any], engine: dict[str, Any], alone: torch.device
) -> None:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS[model](), {"job": JOB, "parallelism": layout, "engine": engine})
    assert parallel.mesh.device == alone
    for step, (loss, norm) in enumerate(plain(model, alone)):
        result = parallel.step(parallel.shard(batch(step)))
        assert result.loss == pytest.approx(loss, rel=TOLERANCE)
        assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE)
