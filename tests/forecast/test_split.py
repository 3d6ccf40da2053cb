"""Which operators tensor parallelism divides, from the graph alone."""

import pytest

from ahp.engines.traits import ExpertTraits
from ahp.forecast.split import split, way_of_keys
from ahp.graph.kept import analyze
from ahp.graph.models import build_model
from ahp.graph.operators import Parameter, Segment
from ahp.job import Job
from ahp.search.slicing.model import slice_model

from .conftest import op, product, spec


def test_a_block_by_hand(mlp_block):
    parts = split(mlp_block, "block")
    assert parts.column == {1}
    assert parts.row == {3}
    assert parts.divided == {1, 2, 3, 5, 6, 7, 8, 9}
    assert parts.contracted == {3, 8}
    assert parts.parameters == {"up.weight", "down.weight"}
    assert [s.shape for s in parts.forward_reduce] == [(64, 32)]
    assert [s.shape for s in parts.backward_reduce] == [(64, 32)]


def test_a_product_without_a_partner_stays_whole():
    x = spec(64, 32)
    segment = Segment(
        "block",
        (product(0, 64, 32, 32, [], parameters=["only.weight"]), op(1, "aten.add", [x, x], [x], [0])),
        (Parameter("only.weight", (32, 32)),),
        x,
    )
    parts = split(segment, "block")
    assert not parts.divided
    assert not parts.parameters
    assert not parts.forward_reduce


def test_projections_to_a_latent_space_stay_whole():
    """down to 16, up to 64, down to 32: a whole latent activation is what the next product splits by columns."""
    x = spec(64, 32)
    operators = (
        product(0, 64, 16, 32, parameters=["a.weight"], module="a"),
        op(1, "aten.norm", [spec(64, 16)], [spec(64, 16)], [0], module="norm"),
        product(2, 64, 64, 16, [1], parameters=["b.weight"], module="b"),
        product(3, 64, 32, 64, [2], parameters=["o.weight"], module="o"),
        op(4, "aten.add", [x, x], [x], [3]),
    )
    weights = {"a": (16, 32), "b": (64, 16), "o": (32, 64)}
    parts = split(
        Segment("block", operators, tuple(Parameter(f"{n}.weight", s) for n, s in weights.items()), x), "block"
    )
    assert (parts.column, parts.row) == ({2}, {3})
    assert parts.parameters == {"b.weight", "o.weight"}
    assert [s.shape for s in parts.backward_reduce] == [(64, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_experts_that_add_a_bias_last_are_split_only_where_the_engine_can(whole):
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    graph = analyze({"model_type": "gpt_oss", "vocab_size": 128, **sizes}, Job(sequence_length=16))
    parts = split(graph.blocks[0], "block", experts=ExpertTraits(whole_biased=whole))
    experts = {p.name for p in graph.blocks[0].parameters if len(p.shape) == 3}
    assert len(experts) == 2
    assert experts & parts.parameters == (set() if whole else experts)
    assert "self_attn.o_proj.weight" in parts.parameters
    assert len(parts.forward_reduce) == (1 if whole else 2)


def test_a_mask_with_as_many_elements_as_the_hidden_states_is_none_of_them():
    x, scores = spec(1, 32, 32), spec(1, 4, 32, 32)  # as many tokens as channels
    operators = (
        product(0, 32, 32, 32, parameters=["query.weight"], module="query"),
        op(1, "aten.bmm", [spec(32, 32)], [scores], [0], flops=2 * 32**3, module="core"),
        op(2, "aten.add", [scores, spec(1, 1, 32, 32)], [scores], [1], module="core"),
        op(3, "aten.bmm", [scores], [spec(32, 32)], [2], flops=2 * 32**3, module="core"),
        product(4, 32, 32, 32, [3], parameters=["out.weight"], module="out"),
        op(5, "aten.add", [x, x], [x], [4]),
    )
    weights = Parameter("query.weight", (32, 32)), Parameter("out.weight", (32, 32))
    parts = split(Segment("block", operators, weights, x), "block")
    assert (parts.column, parts.row) == ({0}, {4})
    assert parts.divided == {0, 1, 2, 3, 4}


def test_llama(tiny):
    block = tiny.blocks[0]
    parts = split(block, "block")
    module = {o.index: o.module for o in block.operators}
    assert {module[i] for i in parts.column} == {f"self_attn.{x}_proj" for x in "qkv"} | {
        "mlp.gate_proj",
        "mlp.up_proj",
    }
    assert {module[i] for i in parts.row} == {"self_attn.o_proj", "mlp.down_proj"}
    assert parts.parameters == {p.name for p in block.parameters if len(p.shape) == 2}
    # Megatron's two all-reduces forward and two backward, whatever the number of column products.
    assert len(parts.forward_reduce) == len(parts.backward_reduce) == 2
    assert all(s.numel == block.output.numel for s in (*parts.forward_reduce, *parts.backward_reduce))
    divided = {module[i] for i in parts.divided if block.operators[i].bytes_written}
    assert "mlp" in divided
    assert "self_attn" in divided
    assert not any("layernorm" in m for m in divided)
    assert all(i in parts.divided for i, o in enumerate(block.operators) if o.flops)


GROUPED_KEYS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "vocab_size": 256,
}


def grouped(heads):
    return {"model_type": "llama", "num_key_value_heads": heads, "max_position_embeddings": 64, **GROUPED_KEYS}


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts of the sequence"])
@pytest.mark.parametrize(("heads", "degree"), [(1, 2), (2, 4), (4, 4)])
def test_whole_keys_move_what_the_real_slicing_moves(heads, degree, in_parts):
    """Bytes that a rank sends in both passes, one pass around the ring of each tensor after the other."""
    sliced = slice_model(build_model(grouped(heads)), degree, enable_sequence_parallel=in_parts).blocks[0]
    block = analyze(grouped(heads), Job(sequence_length=16, precision="fp32"), micro_batch_size=2).blocks[0]
    parts = split(block, "block", way_of_keys=way_of_keys(block, degree, "whole"))
    assert bool(parts.key_gradients) == (degree > heads)
    tensors = [*parts.forward_reduce, *parts.backward_reduce, *parts.key_gradients]
    sent = 2 * sum(s.bytes for s in tensors)
    if in_parts:  # beside it the weights of norms whose gradients are sums over ranks, whole in front of whole keys
        norms = 1 if parts.summed_whole else 2
        sent += sum(s.bytes for s in parts.summed_whole) + 2 * norms * 64 * 4
    assert sent * (degree - 1) // degree == sliced.cost[2]


MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 32,
    },
}  # fmt: skip


def mixture(name):
    sizes = {
        "vocab_size": 128,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    return {"model_type": name, **sizes, **MIXTURES[name]}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_move_what_the_real_slicing_moves(name):
    """One row for each token, forward and backward, with the results of shared experts. Beside it are gradients of the weights of a token's
    experts and of norms of heads, and keys of latent attention."""
    block = analyze(mixture(name), Job(sequence_length=16, precision="fp32"), micro_batch_size=2).blocks[0]
    parts = split(block, "block", experts=ExpertTraits(sums_tokens="both passes"))
    assert parts.tokens_summed == ((parts.backward_reduce[-1], parts.backward_reduce[-1]),)
    assert block.output is not None
    assert all(spec.numel <= block.output.numel for spec in (*parts.forward_reduce, *parts.backward_reduce))
    sent = 2 * sum(spec.bytes for spec in (*parts.forward_reduce, *parts.backward_reduce))
    sliced = slice_model(build_model(mixture(name)), 2).blocks[0].cost[2]
    assert sent < 2 * sliced < 1.05 * sent


@pytest.mark.slow
def test_whole_weights_that_ranks_read_in_parts():
    """Norms of heads always; under sequence parallelism those of hidden states too, and biases after sums."""
    block = analyze(mixture("qwen3_moe"), Job(sequence_length=16)).blocks[0]
    parts = split(block, "block")
    assert [spec.shape for spec in parts.weights_in_parts] == [(16,), (16,)]
    assert sorted(spec.shape for spec in parts.whole_weights) == [(16,), (16,), (64,), (64,)]
    gpt2 = split(analyze("gpt2", Job(sequence_length=16)).blocks[0], "block")
    assert not gpt2.weights_in_parts
    assert len(gpt2.whole_weights) == 6  # of two norms, and the biases of two row products


def test_torchtitan_adds_up_gradients_of_copies():
    block = analyze(mixture("mixtral"), Job(sequence_length=16, precision="fp32"), micro_batch_size=2).blocks[0]
    megatron, titan = (split(block, "block", experts=ExpertTraits(sums_tokens=of)) for of in ("nowhere", "forward"))
    copies, tokens = megatron.backward_reduce[-1], titan.backward_reduce[-1]
    assert block.output is not None
    assert copies.numel == 2 * tokens.numel == 2 * block.output.numel
    assert titan.tokens_summed == ((tokens, copies),)
    assert [spec.numel for spec in megatron.forward_reduce] == [block.output.numel, copies.numel]
    assert [spec.numel for spec in titan.forward_reduce] == [block.output.numel] * 2


@pytest.mark.slow
def test_what_keys_of_fewer_heads_are_made_by():
    graph = analyze(grouped(2), Job(sequence_length=16))
    block = graph.blocks[0]
    module = {o.index: o.module for o in block.operators}
    assert block.keys.heads == 2
    assert {module[i] for i in block.keys.products} == {"self_attn.k_proj", "self_attn.v_proj"}
    parts = split(block, "block", way_of_keys="whole")
    assert {module[i] for i in parts.column} == {"self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"}
    assert {p for p in ("self_attn.k_proj.weight", "self_attn.v_proj.weight") if p in parts.parameters} == set()
    assert [s.shape for s in parts.key_gradients] == [(1, 2, 16, 8)] * 2
    back = [block.operators[i] for i in parts.keys if block.operators[i].phase == "backward"]
    assert back
    assert all(2 in o.outputs[0].shape[1:3] for o in back)
    gathered = split(block, "block", way_of_keys="gathered")
    assert sorted(s.shape for s in gathered.gathered_heads) == [(16, 16), (16, 16), (16, 64)]
    assert gathered.parameters == split(block, "block").parameters


@pytest.mark.slow
def test_heads_that_are_gathered_after_their_norms():
    """torchtitan f9e8897a6, experiments/qwen3/infra/parallelize.py: what turns queries and keys forward is whole then, and nothing else."""
    job = Job(sequence_length=16)
    block = analyze(grouped(2) | {"model_type": "qwen3", "head_dim": 8}, job, attention="flash").blocks[0]
    apart, gathered = (split(block, "block", gathers_normed=gathers) for gathers in (False, True))
    assert not apart.normed_heads
    assert sorted(s.shape for s in gathered.normed_heads) == [(1, 16, 2, 8), (1, 16, 8, 8)]
    whole = [block.operators[i] for i in gathered.keys]
    assert {(o.phase, o.module) for o in whole if o.bytes_written} == {("forward", "self_attn")}
    assert {"aten.cat", "aten.neg"} <= {o.name for o in whole}
    assert all(o.flops == 0 for o in whole)
    assert gathered.divided == apart.divided
    llama = analyze(grouped(2), job, attention="flash").blocks[0]
    assert split(llama, "block", gathers_normed=True) == split(llama, "block")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "keys", "ways"),
    [
        ({}, {}, ["parts", "whole", "whole"]),
        ({"document_mask": True}, {}, ["parts", "whole attention", "whole attention"]),  # keys are repeated for a mask
        ({}, {"num_key_value_heads": 8}, ["parts", "parts", "parts"]),
        ({}, {"model_type": "phi3", "pad_token_id": 0}, ["parts", "whole attention", "whole attention"]),  # one product
    ],
    ids=["llama", "masked", "as many", "packed"],
)
def test_where_more_ranks_than_key_heads_share_attention(job, keys, ways):
    block = analyze(grouped(2) | keys, Job(sequence_length=16, **job)).blocks[0]
    assert [way_of_keys(block, degree, "whole") for degree in (2, 4, 8)] == ways
    assert way_of_keys(block, 4, "refused") == "parts"


def test_attention_that_is_whole_on_every_rank():
    block = analyze(grouped(2) | {"model_type": "phi3", "pad_token_id": 0}, Job(sequence_length=16)).blocks[0]
    parts = split(block, "block", way_of_keys="whole attention")
    assert parts.parameters == {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
    assert len(parts.forward_reduce) == len(parts.backward_reduce) == 1
    assert not any("attention" in block.operators[i].name for i in parts.divided)


def test_the_ends_of_llama(tiny):
    embedding, head = split(tiny.embedding, "embedding"), split(tiny.head, "head")
    assert embedding.parameters == {"model.embed_tokens.weight"}
    assert len(embedding.forward_reduce) == 1
    assert head.parameters == {"lm_head.weight"}
    assert [s.numel for s in head.backward_reduce] == [tiny.blocks[0].output.numel]
    assert all(i in head.divided for i, o in enumerate(tiny.head.operators) if o.flops)
    whole = {o.module for o in tiny.head.operators if o.index not in head.divided}
    assert "model.norm" in whole
