"""How long a sequence a model takes, by its tables and its config; and that nothing longer is trained on without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ahp.errors import BadInput
from ahp.graph.models import build_model
from ahp.graph.positions import context_of, positions_of, refuse_longer
from ahp.graph.trace import analyze
from ahp.job import Job
from tests.graph.small import custom

SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
HYBRID = {**SIZE, "model_type": "granitemoehybrid", "num_key_value_heads": 2, "max_position_embeddings": 128,
          "shared_intermediate_size": 48, "mamba_n_heads": 4, "layer_types": ["attention", "attention"]}  # fmt: skip


def llama(**rope: Any) -> dict[str, Any]:
    given = {"rope_scaling": {"rope_theta": 10000.0, **rope}} if rope else {}
    return {"model_type": "llama", **SIZE, "max_position_embeddings": 128, **given}


TABLES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **GPT},
    "opt, with two rows before the first": {"model_type": "opt", "vocab_size": 97, "hidden_size": 32, "ffn_dim": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 32},
    "roberta, whose first rows are for padding": {"model_type": "roberta", **SIZE, "max_position_embeddings": 130, "pad_token_id": 1},
    "gpt-j, which looks its angles up": {"model_type": "gptj", **GPT, "rotary_dim": 4},
}  # fmt: skip
"""All of 128 positions."""

ROTARY: dict[str, tuple[dict[str, Any], int]] = {
    "plain": (llama(), 128),
    "linear, length before scaling": (llama(rope_type="linear", factor=4.0), 512),
    "yarn, length before scaling": (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=128), 512),
    "llama3, length after scaling": (
        {**llama(rope_type="llama3", factor=8.0, original_max_position_embeddings=128, low_freq_factor=1.0, high_freq_factor=4.0),
         "max_position_embeddings": 1024}, 1024),
    "several kinds of layers": ({"model_type": "modernbert", **SIZE, "pad_token_id": 0, "max_position_embeddings": 128}, 128),
    "a family that may have none": ({**HYBRID, "position_embedding_type": "rope"}, 128),
}  # fmt: skip

UNBOUND: dict[str, dict[str, Any]] = {
    "angles that grow with the sequence": llama(rope_type="dynamic", factor=2.0),
    "alibi in falcon": {
        "model_type": "falcon",
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "alibi": True,
        "max_position_embeddings": 128,
    },
    "alibi in bloom": {"model_type": "bloom", "vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "no positions at all": HYBRID,
}


@pytest.mark.slow
@pytest.mark.parametrize("which", TABLES)
def test_a_table_ends_with_its_rows(which: str) -> None:
    module = build_model(TABLES[which], device="cpu")
    positions = positions_of(module)
    assert positions is not None
    assert (positions.longest, positions.is_table) == (128, True)
    module(input_ids=torch.zeros(1, 128, dtype=torch.long) + 5)
    with pytest.raises((IndexError, RuntimeError)):
        module(input_ids=torch.zeros(1, 129, dtype=torch.long) + 5)
    assert analyze(TABLES[which], Job(sequence_length=128, precision="fp32")).sequence_length == 128
    with pytest.raises(BadInput, match=r"sequence_length = 129: the model has 128 positions \(valid: 2 to 128\)"):
        analyze(TABLES[which], Job(sequence_length=129, precision="fp32"))


@pytest.mark.parametrize("which", ROTARY)
def test_rotary_positions_end_where_the_config_says(which: str) -> None:
    model, longest = ROTARY[which]
    module = build_model(model)
    positions = positions_of(module)
    assert positions is not None
    assert (positions.longest, positions.is_table) == (longest, False)
    refuse_longer(module, longest)
    with pytest.raises(
        BadInput, match=rf"job\.sequence_length = {longest + 1}: .*max_position_embeddings .*2 to {longest};"
    ):
        refuse_longer(module, longest + 1)


@pytest.mark.slow
def test_a_longer_sequence_is_forecast_with_a_warning() -> None:
    """Published runs extend a model's context, and their plans change its config."""
    with pytest.warns(UserWarning, match=r"sequence_length = 256: the model takes 128 positions.*training refuses it"):
        assert analyze(llama(), Job(sequence_length=256)).sequence_length == 256


@pytest.mark.parametrize("which", UNBOUND)
def test_what_has_no_limit_is_not_refused(which: str) -> None:
    module = build_model(UNBOUND[which])
    assert positions_of(module) is None
    refuse_longer(module, 1_000_000)


def test_a_module_of_ones_own_says_nothing() -> None:
    refuse_longer(custom(), 1_000_000)


def test_the_context_is_that_of_rows_which_stand_for_tokens() -> None:
    assert [context_of(model) for model in TABLES.values()] == [128] * 4
    assert context_of(HYBRID) == 128, "what it is made for, though nothing ends there"
    assert context_of("tests.graph.small:custom") is None
