"""What ``ahp explain`` says of the split of a plan."""

from __future__ import annotations

from typing import Any

from ahp.plan import Plan, validated
from ahp.search.slicing.explain import lines_of

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def told(degree: int, **more: Any) -> list[str]:
    job = {"sequence_length": 32, "global_batch_size": 4, "precision": "bf16"}
    layout = {"tensor_parallel_degree": degree, "micro_batch_size": 2, **more}
    return lines_of(validated(Plan, {"model": TINY_LLAMA, "job": job, "parallelism": layout}, "plan"))


def test_tells_modules_by_split_and_what_a_rank_does_holds_and_sends() -> None:
    column, row, cost = told(2)
    assert column.startswith("column (n: ")
    assert column.endswith("mlp.gate_proj, mlp.up_proj, lm_head")
    assert row.startswith("row (k: ")
    assert row.endswith("model.embed_tokens, self_attn.o_proj, mlp.down_proj")
    # bf16 hidden states of 2 x 32 tokens; an all-reduce over 2 ranks sends them once, two forward and two backward
    assert 4 * 2 * 32 * 64 * 2 == 2**15
    assert cost.startswith(
        "each block: a rank of 2 does 50 % of the arithmetic, holds 50 % of the matrices and sends 32 KiB"
    )


def test_tells_the_regions_of_sequence_parallelism() -> None:
    regions = [line for line in told(2, enable_sequence_parallel=True) if line.startswith("sequence (m: ")]
    assert len(regions) == 1
    assert regions[0].endswith("input_layernorm, post_attention_layernorm")


def test_is_silent_without_tensor_parallelism_and_tells_why_it_is_impossible() -> None:
    assert told(1) == []
    (reason,) = told(7)
    assert reason.startswith("not possible: tensor_parallel_degree = 7")
