"""Slicing finds the splits that people write by hand, and those of regions that are split along the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.capture import capture
from ahp.graph.kept import analyze
from ahp.graph.outline import outline
from ahp.search.slicing.conversion import Permission
from ahp.search.slicing.model import slice_model, slice_outline, slicing
from ahp.search.slicing.placement import Placement, R, Split
from ahp.search.slicing.solve import LAST_RESORT, _Call, solve
from tests.runtime.models import custom, llama
from tests.search.families import build

SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MEGATRON = {
    "gpt2": (
        {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
        {
            "transformer.wte": "row", "lm_head": "column",
            "transformer.h.*.attn.c_attn": "column", "transformer.h.*.attn.c_proj": "row",
            "transformer.h.*.mlp.c_fc": "column", "transformer.h.*.mlp.c_proj": "row",
        },
        ["transformer.h.*.ln_1", "transformer.h.*.ln_2"],
    ),
    "bert": (
        {**SIZES, "intermediate_size": 128},
        {
            "bert.embeddings.word_embeddings": "row", "cls.predictions.decoder": "column",
            **{f"bert.encoder.layer.*.attention.self.{name}": "column" for name in ("query", "key", "value")},
            "bert.encoder.layer.*.attention.output.dense": "row",
            "bert.encoder.layer.*.intermediate.dense": "column", "bert.encoder.layer.*.output.dense": "row",
        },
        ["bert.encoder.layer.*.attention.output.LayerNorm", "bert.encoder.layer.*.output.LayerNorm"],
    ),
    "opt": (
        {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64},
        {
            "model.decoder.embed_tokens": "row", "lm_head": "column",
            **{f"model.decoder.layers.*.self_attn.{name}_proj": "column" for name in "qkv"},
            "model.decoder.layers.*.self_attn.out_proj": "row",
            "model.decoder.layers.*.fc1": "column", "model.decoder.layers.*.fc2": "row",
        },
        ["model.decoder.layers.*.self_attn_layer_norm", "model.decoder.layers.*.final_layer_norm"],
    ),
    "gpt_neox": (
        {**SIZES, "intermediate_size": 128},
        {
            "gpt_neox.embed_in": "row", "lm_head": "column",
            "gpt_neox.layers.*.attention.query_key_value": "column", "gpt_neox.layers.*.attention.dense": "row",
            "gpt_neox.layers.*.mlp.dense_h_to_4h": "column", "gpt_neox.layers.*.mlp.dense_4h_to_h": "row",
        },
        ["gpt_neox.layers.*.input_layernorm", "gpt_neox.layers.*.post_attention_layernorm"],
    ),
}  # fmt: skip
"""For each family: sizes (dropout as the family has it), the Megatron split, the norms that sequence parallelism splits."""


def small(model_type: str) -> nn.Module:
    from transformers import AutoConfig

    from ahp.graph.models import build_model

    return build_model(AutoConfig.for_model(model_type, **MEGATRON[model_type][0]))


@pytest.mark.parametrize("model_type", list(MEGATRON))
def test_finds_the_megatron_split(model_type: str) -> None:
    _, expected, norms = MEGATRON[model_type]
    assert slicing(small(model_type), 2) == expected
    with_regions = slicing(small(model_type), 2, enable_sequence_parallel=True)
    assert with_regions == {**expected, **dict.fromkeys(norms, "sequence")}


@pytest.mark.slow
def test_sequence_parallelism_moves_the_same_and_holds_less() -> None:
    """An all-reduce is a reduce-scatter and an all-gather; what is more are the gradients of the norms' weights."""
    whole, parts = (slice_model(llama(), 2, enable_sequence_parallel=on).blocks[0] for on in (False, True))
    norms = 2 * 32 * 4  # two norms of 32 fp32 weights, an all-reduce of their gradients over 2 ranks
    assert parts.cost[:2] == whole.cost[:2]
    assert parts.cost[2] == whole.cost[2] + norms
    assert parts.cost[3] < 0.8 * whole.cost[3]


def test_packed_projections_that_a_module_of_no_family_cuts_itself() -> None:
    found = slicing(custom(), 4)
    assert (found["blocks.*.qkv"], found["blocks.*.out"]) == ("column", "row")
    assert (found["blocks.*.up"], found["blocks.*.down"]) == ("column", "row")


def test_experts_are_split_inside_and_the_router_is_whole() -> None:
    found = slicing(build("mixtral"), 2)
    assert found["model.layers.*.mlp.gate"] == "replicated"
    assert found["model.layers.*.mlp.experts.gate_up_proj"] == "column"
    assert found["model.layers.*.mlp.experts.down_proj"] == "row"


@pytest.mark.slow
def test_latent_attention_is_split_behind_its_narrow_projections() -> None:
    found = {name.rpartition("self_attn.")[2]: word for name, word in slicing(build("deepseek_v3"), 2).items()}
    assert found["q_a_proj"] == found["kv_a_proj_with_mqa"] == "replicated"
    assert found["q_b_proj"] == found["kv_b_proj"] == "column"
    assert found["o_proj"] == "row"


def test_fewer_key_heads_than_ranks_stay_whole() -> None:
    """Two key-value heads over four ranks: every rank has all keys and values, and its own query heads."""
    found = slicing(llama(), 4)
    assert found["model.layers.*.self_attn.q_proj"] == "column"
    assert found["model.layers.*.self_attn.k_proj"] == found["model.layers.*.self_attn.v_proj"] == "replicated"
    assert found["model.layers.*.self_attn.o_proj"] == "row"


def test_a_degree_that_does_not_divide_the_heads_leaves_attention_whole() -> None:
    found = slicing(llama(), 3)
    assert found["model.layers.*.mlp.down_proj"] == "row"
    assert found["model.layers.*.self_attn.o_proj"] == found["model.layers.*.self_attn.q_proj"] == "replicated"


def test_refuses_what_cannot_be_split() -> None:
    with pytest.raises(BadInput, match="at least 2"):
        slicing(llama(), 1)
    with pytest.raises(BadInput, match=r"tensor_parallel_degree = 7.*valid: 4, 6, 8, 12"):
        slicing(llama(), 7)


class InPlace(nn.Module):
    """Writes into a view that is looked at through its base: what is written has to be whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.after = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        wide[:, :4] += 1.0
        return x + self.down(wide).relu_()


def test_memory_that_is_written_into_is_whole() -> None:
    captured = capture(InPlace(), (torch.zeros(3, 8),), {})
    targets = [str(node.target) for node in captured.nodes]
    assert "aten.relu_.default" not in targets, "nothing else looks at it"
    found = solve(captured, 2)
    (write,) = (node for node in captured.nodes if str(node.target) == "aten.add_.Tensor")
    assert found.chosen[write].output == R
    assert found.words["up.weight"] == "replicated"


class Mixing(nn.Module):
    """33 columns: neither n nor k can be split in two."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(33, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x)


@pytest.mark.parametrize(("shape", "word"), [((4, 7, 33), "batch"), ((3, 8, 33), "sequence")])
def test_batch_and_m_are_the_last_resort(shape: tuple[int, ...], word: str) -> None:
    captured = capture(Mixing(), (torch.zeros(shape),), {})
    assert solve(captured, 2).words["mix.weight"] == word
    assert solve(captured, 2, permission=Permission()).words["mix.weight"] == "replicated"


def test_a_given_placement_is_kept() -> None:
    captured = slice_model(llama(), 2).outline.captures[0]
    assert not isinstance(captured, BadInput)
    given: dict[str, Placement] = {"mlp.up_proj.weight": R, "mlp.gate_proj.weight": R, "mlp.down_proj.weight": R}
    found = solve(captured, 2, given)
    assert found.weights["mlp.up_proj.weight"] == R
    assert isinstance(found.weights["self_attn.q_proj.weight"], Split)
    with pytest.raises(BadInput, match="given placements"):
        solve(captured, 2, {"mlp.up_proj.weight": Split(1, (32,))})


@pytest.mark.slow
def test_a_model_by_its_name_is_split_as_its_graph_is() -> None:
    assert slicing("tiny", 2) == slicing(analyze("tiny", {"sequence_length": 64}), 2)
    with pytest.raises(BadInput, match=r"model = 'tini': .*nearest names: tiny"):
        slicing("tini", 2)


class Transposing(nn.Module):
    """Falcon's way to multiply by a weight, and the other names that torch has for it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Parameter(torch.ones(64, 32)), nn.Parameter(torch.ones(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (w.swapaxes(0, 1) if self.way == "swapaxes" else getattr(w, self.way) for w in (self.up, self.down))
        return x + torch.relu(x @ up) @ down


@pytest.mark.parametrize("way", ["T", "mT", "swapaxes"])
def test_weights_that_are_transposed_are_split(way: str) -> None:
    module = custom()
    module.blocks = nn.Sequential(*(Transposing(way) for _ in range(2)))
    found = slicing(module, 2)
    assert (found["blocks.*.up"], found["blocks.*.down"]) == ("column", "row")


class Recurrence(nn.Module):
    """The form of a state space model without its kernel: every token is computed apart, and all results are read at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.relu(x * token) for token in range(16)]).sum(0)


def test_what_a_call_reads_decides_its_work_not_how_many_states_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of Zamba took a minute: each of a thousand states ran every call."""
    captured = capture(Recurrence(), (torch.zeros(2, 16, 64, requires_grad=True),), {})
    ways, step = [], _Call.step

    def counted(call: _Call, *given: Any) -> Any:
        ways.append(call.node)
        return step(call, *given)

    monkeypatch.setattr(_Call, "step", counted)
    solve(captured, 2, permission=LAST_RESORT)
    once = [node for node in dict.fromkeys(ways) if len(node.all_input_nodes) == 1]
    assert len(once) > 30
    assert all(ways.count(node) < 50 for node in once), max(ways.count(node) for node in once)


@pytest.mark.parametrize(("dtype", "divided"), [(torch.float32, True), (torch.bfloat16, False)])
def test_experts_are_not_cut_into_rows_that_torchs_kernel_refuses(dtype: torch.dtype, divided: bool) -> None:
    """It takes multiples of 16 bytes; the first step ended in its error."""
    module = build("qwen3_moe", device="cpu", num_experts=4, moe_intermediate_size=24)
    found = outline(module, batch_size=1, sequence_length=8, dtype=dtype)
    weights = slice_outline(found, 2).blocks[0].weights
    assert [isinstance(weights[f"mlp.experts.{name}"], Split) for name in ("gate_up_proj", "down_proj")] == [
        divided
    ] * 2
