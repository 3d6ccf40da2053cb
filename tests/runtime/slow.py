"""A model and data that are slow at one rank, under the loop and the launcher's own settings."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from ahp.graph.models import build_model
from ahp.plan import Plan
from ahp.runtime.data.prefetch import Prefetch
from ahp.runtime.run import own_time
from ahp.runtime.run.trainer import Trainer
from tests.runtime.workers import place

COMPUTES_S = 0.02
"""Of each step, by each rank, beside what the model takes."""
SLOW_RANK = 1
CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def model() -> nn.Module:
    """The last block's forward burns processor time, at the slow rank as many times as much as the variable says."""
    torch.manual_seed(0)
    found = build_model(CONFIG, device="cpu")

    def burn(module: nn.Module, args: Any) -> None:
        traced = type(args[0]) is not torch.Tensor or args[0].is_meta
        if module.training and not traced:
            more = float(os.environ["AHP_TEST_MORE"]) if os.environ["RANK"] == str(SLOW_RANK) else 1.0
            until_s = time.thread_time() + more * COMPUTES_S
            while time.thread_time() < until_s:
                pass

    found.get_submodule("model.layers.2.mlp").register_forward_pre_hook(burn)
    return found


class SlowData(Prefetch):
    """Gives rows late at one rank."""

    def take(self, step: int) -> Any:
        if os.environ["RANK"] == str(SLOW_RANK):
            time.sleep(4 * COMPUTES_S)
        return super().take(step)


def train(rank: int, world: int, plan: Plan, folder: Path, cache: str, more: float, slow_data: bool) -> None:
    """Runs in each worker. This machine is shared with other tests, so what ranks wait for a core is no rank's own here."""
    variables = {**place(rank, world), "AHP_CACHE": cache, "AHP_TEST_MORE": str(more)}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(own_time, "waited_for_core_s", return_value=0.0),
        mock.patch("ahp.runtime.run.loop.Prefetch", SlowData if slow_data else Prefetch),
    ):
        Trainer(plan, folder=folder, checkpoint_every=1000).run()
