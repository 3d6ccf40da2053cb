"""Memory of a step on a GPU beside the forecast's, within the band that its margin gives. ``-s`` shows both, and the times."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import pytest
import torch

import ahp
from ahp.forecast.assembly import NORMAL_90
from ahp.forecast.constants import margins
from ahp.runtime.parallel import parallelize
from ahp.runtime.peak_memory import take_peak

MODEL = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
"""150 million parameters: states of 2 GB, beside which what a library keeps for itself is little."""
JOB = {
    "sequence_length": 1024, "global_batch_size": 8, "steps": 10, "precision": "bf16", "optimizer": {"warmup_steps": 1},
}  # fmt: skip
WARMUP, STEPS = 2, 5

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "eager": ({"micro_batch_size": 4}, {}, {}),
    "compiled": ({"micro_batch_size": 4}, {"compile": True}, {}),
    "recompute": ({"micro_batch_size": 8, "activation_checkpoint": "full"}, {}, {}),
    "selective": ({"micro_batch_size": 8, "activation_checkpoint": "selective"}, {}, {}),
    "chunks": ({"micro_batch_size": 8}, {"loss_chunk_tokens": 1024}, {}),
    "adapters": ({"micro_batch_size": 8, "activation_checkpoint": "full"}, {}, {"lora": {"r": 8}}),
    "8 bits": ({"micro_batch_size": 4}, {}, {"optimizer": {"name": "adamw8bit", "warmup_steps": 1}}),
}
"""Layout, engine and what the job has of its own."""
LIBRARY = {"adapters": "peft", "8 bits": "torchao"}


def rows(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32_000, (8, 1024), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def predicted(case: str, cluster: Any) -> Any:
    layout, engine, own = CASES[case]
    return ahp.simulate(
        model=MODEL, cluster=cluster, job=ahp.Job.model_validate(JOB | own), parallelism=layout, engine={"name": "ahp", **engine}
    )  # fmt: skip


def band(num_bytes: float) -> tuple[float, float]:
    """Where nine of ten measurements lie, by the margin of allocated memory."""
    width = math.exp(NORMAL_90 * margins.value("allocated_error"))
    return num_bytes / width, num_bytes * width


@pytest.fixture(scope="module")
def this_machine() -> Any:
    return ahp.probe(quick=True, workers=1)


@pytest.mark.parametrize("case", CASES)
def test_allocated_memory_is_within_the_forecasts_band(case: str, alone: torch.device, this_machine: Any) -> None:
    from ahp.graph.models import build_model

    if case in LIBRARY:
        pytest.importorskip(LIBRARY[case])
    forecast = predicted(case, this_machine)
    layout, engine, own = CASES[case]
    plan = {"job": JOB | own, "parallelism": layout, "engine": engine}
    parallel = parallelize(build_model(MODEL, device="meta"), plan, device=alone)
    times_s = []
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            take_peak(alone)
        start = time.perf_counter()
        assert math.isfinite(parallel.step(parallel.shard(rows(step))).loss)
        times_s.append(time.perf_counter() - start)
    peak, (low, high) = take_peak(alone), band(forecast.memory_allocated_bytes)
    print(
        f"\n{case}: allocated {peak.allocated_bytes / 2**30:.2f} GiB, forecast {low / 2**30:.2f} to {high / 2**30:.2f}; reserved "
        f"{peak.reserved_bytes / 2**30:.2f}, forecast {forecast.memory_reserved_bytes / 2**30:.2f}; step "
        f"{1e3 * statistics.median(times_s[WARMUP:]):.1f} ms, forecast {1e3 * forecast.step_time_s:.1f}"
    )
    assert low <= peak.allocated_bytes <= high
