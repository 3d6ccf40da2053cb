"""Mixtures of experts: who holds which weights, what is computed and sent, and the rules for the degree."""

import re

import pytest

from ahp.engines.traits import ExpertTraits, KernelTraits
from ahp.errors import AhpError, BadInput
from ahp.forecast.division import GROUPED, Division, expert_parameters, is_weight_gradient
from ahp.forecast.groups import expert_ranks, expert_shards
from ahp.forecast.kernels import CAST, kernels
from ahp.forecast.rules import illegal
from ahp.forecast.selective import kept_results, second_products
from ahp.forecast.split import is_weight_product, split
from ahp.forecast.step import price
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

JOB = Job(sequence_length=128, global_batch_size=16, precision="bf16")
MEGATRON = EngineChoice(name="megatron")


@pytest.fixture(scope="module")
def mixture():
    keys = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    keys |= {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512}
    return analyze({"model_type": "mixtral", **keys}, JOB)


@pytest.fixture(scope="module")
def latent():
    """Multi-head latent attention: queries and keys of 96 + 32, values of 64."""
    keys = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
    keys |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 64}
    keys |= {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 512, "n_group": 1}
    return analyze({"model_type": "deepseek_v3", "topk_group": 1, **keys}, JOB)


def priced(graph, **layout):
    parallelism = Parallelism(**layout)
    return price(graph, make_cluster(per_node=parallelism.world_size), JOB, parallelism, MEGATRON)


@pytest.mark.slow
def test_experts_that_do_not_divide_the_ranks_are_refused_beside_context_parallelism(mixture):
    """Which way of sharing sequences is faster is asked of layouts that have groups for it."""
    keys = {"tensor_parallel_degree": 2, "context_parallel_degree": 3, "enable_sequence_parallel": True}
    layout = Parallelism(**keys, expert_parallel_degree=4)
    with pytest.raises(AhpError, match=r"expert_parallel_degree = 4: must divide"):
        price(mixture, make_cluster(nodes=2, per_node=3), JOB, layout, EngineChoice())


def test_the_work_is_the_same_on_fewer_experts_with_more_tokens(mixture):
    block = mixture.blocks[0]
    one, four = (Division(split(block, "block"), expert=ranks) for ranks in (1, 4))
    grouped = [op for op in block.operators if op.name in GROUPED]
    assert len(grouped) == 6  # gate with up, and down: forward and both gradients
    for op in grouped:
        (b1, m1, n1, k1), (b4, m4, n4, k4) = one.product(op), four.product(op)
        assert b1 == 4 * b4 == 8
        assert 2 * b1 * m1 * n1 * k1 == pytest.approx(op.flops)
        assert b4 * m4 * n4 * k4 == pytest.approx(b1 * m1 * n1 * k1)
        assert (k4 == 4 * k1) if is_weight_gradient(op) else (m4 == 4 * m1)


def test_what_experts_make_is_not_kept_for_their_weighting(mixture):
    block = mixture.blocks[0]
    last = [op for op in block.phase("forward") if op.name in GROUPED][-1]
    tokens, hidden = JOB.sequence_length * mixture.micro_batch_size, 256
    assert last.outputs[0].numel == 2 * tokens * hidden  # a hidden state for each of the two experts of a token
    eager, fused = kernels(block, KernelTraits("eager")).saved_bytes, kernels(block, KernelTraits("fused")).saved_bytes
    assert eager[last.index] == last.outputs[0].bytes
    assert last.index not in fused
    reads = {op.index for op in block.operators if op.name in GROUPED and op.phase == "forward"} - {last.index}
    assert reads <= set(fused)  # what the activation is made of again


@pytest.mark.slow
def test_a_router_in_fp32_keeps_no_wider_copy(latent):
    block = latent.blocks[1]
    casts = [op for op in block.phase("forward") if op.name == CAST and op.module.endswith("gate")]
    kept = kernels(block, KernelTraits("eager")).saved_bytes
    assert any(op.index in kept for op in casts)
    assert not any(op.index in kernels(block, KernelTraits("fused")).saved_bytes for op in casts)


def test_empty_gradients_are_of_one_expert(mixture):
    shared = priced(mixture, data_parallel_replicate_degree=4, expert_parallel_degree=4)
    whole = priced(mixture, data_parallel_replicate_degree=4)
    block = mixture.blocks[0]
    stacked = {p.name: p for p in block.parameters if p.name in expert_parameters(block)}
    dense = sum(p.numel for p in block.parameters if p.name not in stacked)
    one = sum(p.numel // p.shape[0] for p in stacked.values())
    head = sum(p.numel for p in mixture.head.parameters)
    for found in (whole, shared):
        assert found.forecast.memory["reduce_buffers"] == 2 * (dense + one + head)


def test_each_rank_holds_its_experts_alone(mixture):
    stacked = expert_parameters(mixture.blocks[0])
    experts = 2 * sum(p.numel for p in mixture.blocks[0].parameters if p.name in stacked)
    dense = mixture.num_parameters - experts
    whole, shared = (
        priced(mixture, data_parallel_replicate_degree=4),
        priced(mixture, data_parallel_replicate_degree=4, expert_parallel_degree=4),
    )
    assert whole.memory.weights.total.sum() == mixture.num_parameters
    assert shared.memory.weights.total.sum() == dense + experts // 4
    assert whole.forecast.memory["optimizer_states"] == 8 * mixture.num_parameters
    assert shared.forecast.memory["optimizer_states"] == 8 * (dense + experts // 4)


@pytest.mark.parametrize("expert", [1, 2, 4])
def test_sharded_states_do_not_depend_on_who_holds_the_experts(mixture, expert):
    # Four ranks divide every state, whether they hold all experts or one expert-parallel group holds them once.
    found = priced(mixture, data_parallel_shard_degree=4, zero_stage=1, expert_parallel_degree=expert)
    assert found.forecast.memory["optimizer_states"] == pytest.approx(8 * mixture.num_parameters / 4, abs=8)


def test_tokens_travel_to_their_experts_and_back(mixture):
    still = priced(mixture, data_parallel_replicate_degree=4).forecast.step
    sent = priced(mixture, data_parallel_replicate_degree=4, expert_parallel_degree=4).forecast.step
    assert "expert_parallel" not in still
    assert sent["expert_parallel"] > 0
    assert sent["gradient_reduce"] < still["gradient_reduce"]


@pytest.mark.slow
def test_fused_attention_takes_values_narrower_than_queries(latent):
    names = [op.name for op in latent.blocks[-1].operators if op.flops]
    assert any("scaled_dot_product" in name for name in names)
    assert "aten.bmm" not in names


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"expert_parallel_degree": 3, "data_parallel_replicate_degree": 3}, "does not divide num_experts 8"),
        (
            {"expert_parallel_degree": 4, "data_parallel_replicate_degree": 2},
            "the 2 ranks of the data and context axes",
        ),
        ({"context_parallel_degree": 3}, "two parts for each rank"),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": True, "context_parallel_degree": 2}, None),
    ],
)
def test_rules(mixture, layout, words):
    parallelism = Parallelism(**layout)
    batch = JOB.model_copy(update={"global_batch_size": 48})
    reason = illegal(mixture, make_cluster(per_node=parallelism.world_size), batch, parallelism, MEGATRON)
    assert (
        (reason is None)
        if words is None
        else (words in str(reason) and re.search(r"\((valid|nearest): ", str(reason)) is not None)
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2}, "expert_parallel_degree = 2"),
        ({"tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2}, "expert_tensor_parallel_degree = 2"),
    ],
)
def test_a_dense_model_has_no_experts_to_share(hand_graph, layout, words):
    job = Job(sequence_length=64, precision="bf16")
    with pytest.raises(BadInput, match=f"{words}: the model has no experts"):
        price(hand_graph, make_cluster(per_node=2), job, Parallelism(**layout), MEGATRON)


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("moe_token_dispatcher_type", "flex", "null"),
        ("overlap_moe_expert_parallel_comm", True, "null"),
        ("cuda_graph_modules", ("attn", "moe_router"), r"null, \['attn'\]"),
        ("cuda_graph_modules", ("attn",), None),
        ("overlap_moe_expert_parallel_comm", False, None),
    ],
)
def test_keys_about_experts_are_refused_for_a_dense_model(hand_graph, key, value, valid):
    job = Job(sequence_length=64, precision="bf16")
    choice = EngineChoice(**{"name": "megatron", key: value})
    reason = illegal(hand_graph, make_cluster(per_node=1), job, Parallelism(), choice)
    assert reason is None if valid is None else re.search(rf"engine.{key} = .*no experts \(valid: {valid}", str(reason))


def test_all_tokens_travel_where_they_are_gathered_first(mixture):
    layout = {
        "data_parallel_shard_degree": 2,
        "zero_stage": 1,
        "expert_parallel_degree": 2,
        "tensor_parallel_degree": 2,
    }
    cluster = make_cluster(per_node=4)
    for engine, same in ((EngineChoice(), True), (MEGATRON, False)):
        whole, parts = (
            price(mixture, cluster, JOB, Parallelism(**layout, enable_sequence_parallel=sequence), engine).forecast.step
            for sequence in (False, True)
        )
        assert (parts["expert_parallel"] == pytest.approx(whole["expert_parallel"])) == same


def test_torchtitan_keeps_no_result_of_stacked_experts(mixture):
    """Of the five products beside them, the router's the last, the second and the fourth are run again too."""
    block = mixture.blocks[0]
    products = [op for op in block.phase("forward") if is_weight_product(op)]
    plain = [op.index for op in products if op.name == "aten.mm"]
    grouped = {op.index for op in products if op.name in GROUPED}
    assert len(plain) == 5
    assert grouped
    assert second_products(block) == {plain[1], plain[3], *grouped}
    assert grouped < kept_results(block)


FOLDED = {"tensor_parallel_degree": 2, "enable_sequence_parallel": True, "zero_stage": 1}


def test_torchtitan_keeps_what_arrived_or_sends_it_again(mixture):
    """torchtitan c4e229115: results of all-to-alls are on the list of what selective recompute keeps."""
    layout = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "zero_stage": 3}

    def found(day, kind):
        choice = EngineChoice(name="torchtitan", compile=False, version=day)
        parallelism = Parallelism(**layout, activation_checkpoint=kind)
        return price(mixture, make_cluster(per_node=2), JOB, parallelism, choice).forecast

    before, since = "2025-09-05", "2025-09-06"
    again, kept = found(before, "selective"), found(since, "selective")
    copies, layers = JOB.sequence_length * 2 * 256 * 2, 2  # two experts of a token, a width of 256, 2 bytes
    assert kept.memory["activations"] - again.memory["activations"] == layers * 2 * copies
    pass_s = found(since, "none").step["expert_parallel"] / 2
    assert kept.step["expert_parallel"] == pytest.approx(2 * pass_s)
    assert again.step["expert_parallel"] == pytest.approx(3 * pass_s)
    for kind in ("none", "full"):
        assert found(before, kind) == found(since, kind)


def test_ahp_keeps_what_arrived_and_one_sum_for_each_token(mixture):
    """runtime/experts/dispatch.py; tests/runtime/experts/test_host_waits.py measures it."""

    def found(degree, kind):
        layout = Parallelism(
            data_parallel_shard_degree=2, expert_parallel_degree=degree, zero_stage=3, activation_checkpoint=kind
        )
        return price(mixture, make_cluster(per_node=2), JOB, layout, EngineChoice()).forecast

    more = [
        found(2, kind).memory["activations"] - found(1, kind).memory["activations"] for kind in ("selective", "none")
    ]
    layers, tokens = 2, JOB.sequence_length * 256 * 2  # two experts of a token, a width of 256, 2 bytes
    assert more[0] - more[1] == layers * (2 + 1) * tokens
    assert found(2, "selective").step["expert_parallel"] == found(2, "none").step["expert_parallel"]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "reads"), [("qwen3_moe", False), ("qwen2_moe", True), ("deepseek_v3", True)])
def test_what_a_second_run_of_experts_sends(model_type, reads):
    """runtime/experts/dispatch.py: results come back only where something after them is read, as of shared experts and their gates."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 128,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    own = {"num_experts": 4}
    if model_type == "deepseek_v3":
        own = {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
        }
        own |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    graph = analyze({"model_type": model_type, **sizes, **own}, JOB)

    def seconds(kind):
        layout = Parallelism(
            data_parallel_shard_degree=2, expert_parallel_degree=2, zero_stage=3, activation_checkpoint=kind
        )
        return price(graph, make_cluster(per_node=2), JOB, layout, EngineChoice()).forecast.step["expert_parallel"]

    plain, again = seconds("none"), seconds("full")
    if reads:
        assert again == pytest.approx(1.5 * plain)
    else:
        assert 1.25 * plain < again < 1.4 * plain  # tokens, and half of three messages with numbers; not results


def test_whole_experts_multiply_the_rows_of_a_tensor_rank(mixture):
    block = mixture.blocks[0]
    grouped = [op for op in block.operators if op.name in GROUPED]
    parts = split(block, "block", experts=ExpertTraits(folded=True))
    assert parts.rows == {op.index for op in grouped}
    assert not parts.rows & (parts.divided | parts.contracted)
    assert not expert_parameters(block) & parts.parameters
    division = Division(parts, 2, sequence_parallel=True, expert=4)
    for op in grouped:
        b, m, n, k = division.product(op)
        b1, m1, n1, k1 = Division(parts).product(op)
        assert b * m * n * k == pytest.approx(b1 * m1 * n1 * k1 / 2)
        assert b == b1 / 4
        rows = (k, k1) if is_weight_gradient(op) else (m, m1)
        assert rows[0] == pytest.approx(4 / 2 * rows[1])
        assert division.share(op) == 0.5
    divided = Division(split(block, "block"), 2, sequence_parallel=True, expert=4)
    moved = [op for op in block.phase("forward") if op.flops == 0 and op.bytes_written]
    assert {division.share(op) for op in moved} == {divided.share(op) for op in moved} == {0.5}


def test_folded_experts_leave_no_tensor_collective_of_theirs(mixture):
    block = mixture.blocks[0]
    divided, folded = split(block, "block"), split(block, "block", experts=ExpertTraits(folded=True))
    assert (len(divided.forward_reduce), len(folded.forward_reduce)) == (2, 1)  # attention and experts; attention
    assert (len(divided.backward_reduce), len(folded.backward_reduce)) == (2, 1)


def test_expert_ranks_may_span_tensor_ranks(mixture):
    layout = Parallelism(data_parallel_shard_degree=2, expert_parallel_degree=4, **FOLDED)
    found = price(mixture, make_cluster(per_node=4), JOB, layout, MEGATRON)
    stacked = expert_parameters(mixture.blocks[0])
    experts = 2 * sum(p.numel for p in mixture.blocks[0].parameters if p.name in stacked)
    whole = price(
        mixture,
        make_cluster(per_node=2),
        JOB,
        Parallelism(data_parallel_shard_degree=1, **FOLDED | {"zero_stage": 0}),
        MEGATRON,
    )
    dense = int(whole.memory.weights.total.sum()) - experts // 2
    assert int(found.memory.weights.total.sum()) == dense + experts // 4
    # One rank alone holds each expert: nobody divides its states.
    assert found.forecast.memory["optimizer_states"] == pytest.approx(8 * (dense / 2 + experts / 4), abs=8)
    assert found.forecast.step["expert_parallel"] > 0


@pytest.mark.parametrize("expert", [2, 4, 8])
def test_states_of_folded_experts_are_divided_by_all_that_hold_them(mixture, expert):
    layout = Parallelism(
        data_parallel_shard_degree=4, expert_parallel_degree=expert, expert_tensor_parallel_degree=1, **FOLDED
    )
    found = price(mixture, make_cluster(per_node=8), JOB, layout, MEGATRON)
    divided = layout.model_copy(update={"expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2})
    other = price(mixture, make_cluster(per_node=8), JOB, divided, MEGATRON)
    states = found.forecast.memory["optimizer_states"], other.forecast.memory["optimizer_states"]
    assert states[0] == pytest.approx(states[1], abs=16)


@pytest.mark.parametrize(
    ("engine", "keys", "words"),
    [
        ("ahp", {"expert_tensor_parallel_degree": 1}, "expert_tensor_parallel_degree = 1: every expert is divided over all 2"),
        ("deepspeed", {"expert_tensor_parallel_degree": 1, "enable_sequence_parallel": False}, "deepspeed divides every expert"),
        ("megatron", {"expert_tensor_parallel_degree": 3}, r"is priced as 1 or as tensor_parallel_degree alone \(valid: 1, 2\)"),
        ("megatron", {"expert_tensor_parallel_degree": 1, "enable_sequence_parallel": False}, "needs enable_sequence_parallel"),
        ("megatron", {"expert_tensor_parallel_degree": 2}, "the 2 ranks of the data and context axes"),
        ("megatron", {"enable_sequence_parallel": False}, "the 2 ranks of the data and context axes"),
        ("megatron", {"expert_parallel_degree": 8}, "the 4 ranks of the data, context and tensor axes"),
        ("megatron", {}, None),
        ("megatron", {"expert_tensor_parallel_degree": 1}, None),
        ("torchtitan", {}, None),
    ],
)  # fmt: skip
def test_who_folds_experts(mixture, engine, keys, words):
    layout = Parallelism(**{"data_parallel_shard_degree": 2, "expert_parallel_degree": 4, **FOLDED, **keys})
    reason = illegal(mixture, make_cluster(per_node=4), JOB, layout, EngineChoice(name=engine))
    if words is None:
        assert reason is None
    else:
        assert reason is not None
        assert re.search(words, reason), reason


@pytest.mark.parametrize(("tensor", "context", "shard", "replicate", "expert"), [
    (2, 1, 4, 1, 8), (2, 2, 2, 2, 4), (4, 1, 2, 2, 2), (2, 1, 2, 4, 16), (4, 2, 1, 1, 8), (2, 1, 8, 1, 2),
])  # fmt: skip
def test_folded_groups_are_megatrons(tensor, context, shard, replicate, expert):
    """core/parallel_state.py: expert ranks are numbered expert, then data, innermost first, within a stage."""
    layout = Parallelism(
        tensor_parallel_degree=tensor, context_parallel_degree=context, data_parallel_shard_degree=shard, zero_stage=1,
        data_parallel_replicate_degree=replicate, enable_sequence_parallel=True, expert_parallel_degree=expert,
    )  # fmt: skip
    share, alike = expert_ranks(layout, True)

    def members(runs):
        found = {0}
        for run in runs:
            found = {rank + run.stride * i for rank in found for i in range(run.size)}
        return found

    world = tensor * context * shard * replicate
    assert members(share) == set(range(expert))
    assert members(alike) == set(range(0, world, expert))
    assert expert_shards(layout, True) == max(1, min(shard * context * tensor // expert, world // expert))
