"""Steps on a GPU beside plain PyTorch on the same device: the same loss and gradient norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.models import BUILDERS, JOB, MODELS, batch, reference
from tests.runtime.test_families import FAMILIES

NAMES = (*MODELS, "biased", *(f"family {name}" for name in FAMILIES))
STEPS = 6
TOLERANCE = 1e-4
"""fp32 without TF32; sums in another order."""


@pytest.mark.parametrize("engine", [{}, {"compile": True}], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", [{}, {"micro_batch_size": 2, "activation_checkpoint": "selective"},
                                    {"micro_batch_size": 2, "activation_checkpoint": "full"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("model", NAMES)
def test_steps_equal_plain_pytorch(
    model: str, layout: dict[str, Any], engine: dict[str, Any], alone: torch.device
) -> None:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(BUILDERS[model](), {"job": JOB, "parallelism": layout, "engine": engine})
    assert parallel.mesh.device == alone
    expected = reference(model, STEPS, device=alone)
    for step, (loss, norm) in enumerate(zip(expected["losses"], expected["norms"], strict=True)):
        result = parallel.step(parallel.shard(batch(step)))
        assert result.loss == pytest.approx(loss, rel=TOLERANCE)
        assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE)
