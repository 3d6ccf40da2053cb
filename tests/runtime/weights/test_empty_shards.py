"""A rank that holds no row of a parameter goes on with AdamW's step all the same: its next layout may give it some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.marks import cases
from tests.runtime.restarts import SEQUENCE, VOCABULARY, Restart, check
from tests.runtime.workers import Pool


def two_experts() -> nn.Module:
    from tests.search.families import build

    return build("mixtral", device="cpu", num_local_experts=2, vocab_size=VOCABULARY)


def four_rows() -> nn.Module:
    """Its keys and values have four rows: of three shards one is empty, of six two are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=1, max_position_embeddings=SEQUENCE, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def zero(stage: int, degree: int, **more: Any) -> dict[str, Any]:
    return {"data_parallel_shard_degree": degree, "zero_stage": stage, **more}


MOVES = {
    "zero3-experts": Restart(two_experts, zero(3, 4), zero(3, 4)),
    "zero1-to-expert-parallel": Restart(two_experts, zero(1, 4), zero(3, 2, expert_parallel_degree=2)),
    "expert-parallel-to-zero1": Restart(two_experts, zero(3, 4, expert_parallel_degree=2), zero(1, 4)),
    "zero3-dense-3-to-6": Restart(four_rows, zero(3, 3), zero(2, 6)),
    "zero3-dense-6-to-one": Restart(four_rows, zero(3, 6), {}),
}


@pytest.mark.parametrize("name", cases(MOVES, wide=("zero3-dense-6-to-one", "zero1-to-expert-parallel")))
def test_the_step_goes_on(pool: Pool, tmp_path: Path, name: str) -> None:
    check(pool, MOVES[name], tmp_path)
