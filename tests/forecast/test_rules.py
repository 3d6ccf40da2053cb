"""Every rule names the user's key, its value and what would be valid."""

from dataclasses import replace

import pytest

from ahp.errors import BadInput
from ahp.forecast.rules import batch, illegal, products, tensor
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.search.ranking import search

from .conftest import make_cluster

JOB = Job(sequence_length=64, global_batch_size=16)


def reason(graph, layout, *, job=JOB, cluster=None, engine=None):
    layout = Parallelism(**layout)
    cluster = cluster or make_cluster(per_node=layout.world_size)
    return illegal(graph, cluster, job, layout, engine or EngineChoice())


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data_parallel_shard_degree": 4, "micro_batch_size": 4},
        {"tensor_parallel_degree": 2},
        {"pipeline_parallel_degree": 4},
        {"pipeline_parallel_degree": 4, "micro_batch_size": 8},
        {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2},
        {"pipeline_parallel_degree": 2, "layers_per_stage": (3, 1)},
        {"activation_checkpoint": "auto"},
    ],
)
def test_legal(hand_graph, layout):
    assert reason(hand_graph, layout) is None


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            {"data_parallel_replicate_degree": 3},
            ["data_parallel_replicate_degree = 3", "global_batch_size 16", "valid: 1, 2, 4"],
        ),
        (
            {"data_parallel_replicate_degree": 3, "data_parallel_shard_degree": 2},
            ["data_parallel_replicate_degree x data_parallel_shard_degree = 6", "global_batch_size 16"],
        ),
        ({"micro_batch_size": 3}, ["micro_batch_size = 3", "16 sequences", "valid: 1, 2, 4, 8"]),
        ({"tensor_parallel_degree": 8}, ["tensor_parallel_degree = 8", "num_attention_heads 4", "valid: 1, 2, 4"]),
        ({"pipeline_parallel_degree": 8}, ["pipeline_parallel_degree = 8", "4 layers"]),
        ({"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 3}, ["= 6 stages", "4 layers"]),
        ({"virtual_stages_per_rank": 2}, ["virtual_stages_per_rank = 2"]),
        ({"pipeline_parallel_degree": 2, "layers_per_stage": (3, 2)}, ["layers_per_stage = [3, 2]", "4 layers"]),
        (
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "DualPipeV",
                "virtual_stages_per_rank": 2,
                "micro_batch_size": 8,
            },
            ["DualPipeV needs", "there are 2"],
        ),
        ({"context_parallel_degree": 2}, ["context_parallel_degree = 2", "valid: 1"]),
    ],
)
def test_illegal(hand_graph, layout, words):
    text = reason(hand_graph, layout)
    assert text is not None
    assert all(word in text for word in words), text


def test_1f1b_runs_fewer_micro_batches_than_ranks_but_in_torchs_own_class(hand_graph):
    few = {"pipeline_parallel_degree": 4, "micro_batch_size": 8}
    assert reason(hand_graph, few) is None
    told = reason(hand_graph, few, engine=EngineChoice(name="torchtitan"))
    assert all(words in told for words in ("torch's 1F1B needs", "there are 2"))


def test_valid_degrees_beside_a_huge_one_are_not_counted_one_by_one(hand_graph):
    told = tensor(hand_graph, Job(), Parallelism(tensor_parallel_degree=10**12), EngineChoice())
    assert told is not None
    assert told.endswith("(valid: 1, 2, 4)")


def test_valid_degrees_of_a_huge_batch_are_not_counted_one_by_one():
    told = batch(Job(global_batch_size=999_999_937), Parallelism(data_parallel_replicate_degree=2))  # a prime
    assert told is not None
    assert told.endswith("(valid: 1, 999999937)")


@pytest.mark.parametrize("engine", ["ahp", "megatron", "torchtitan"])
def test_more_ranks_than_key_heads(hand_graph, engine):
    """Of 2: as many more as go into whole copies, for an engine that shares them so."""
    found = reason(hand_graph, {"tensor_parallel_degree": 4}, engine=EngineChoice(name=engine))
    assert (found is None) == (engine != "torchtitan")
    assert found is None or all(
        word in found for word in ("= 4", "does not divide num_key_value_heads 2", "valid: 1, 2")
    )
    six = replace(hand_graph, config={"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 48})
    found = reason(six, {"tensor_parallel_degree": 4}, engine=EngineChoice(name=engine))
    assert found is not None
    assert "num_key_value_heads 6" in found


@pytest.mark.slow
def test_whole_attention_meets_no_parts_of_the_sequence():
    sizes = {"n_embd": 64, "n_inner": 128, "n_layer": 1, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    graph = analyze({"model_type": "gpt_bigcode", **sizes}, JOB)
    assert reason(graph, {"tensor_parallel_degree": 4}) is None
    found = reason(graph, {"tensor_parallel_degree": 4, "enable_sequence_parallel": True})
    assert found is not None
    assert all(word in found for word in ("enable_sequence_parallel = True", "attention whole", "valid: False"))


def test_the_clusters_rules(hand_graph):
    two = {"data_parallel_replicate_degree": 2}
    text = reason(hand_graph, two, cluster=make_cluster(per_node=4))
    assert text is not None
    assert "multiply to 2" in text
    assert "4 devices" in text
    no_network = make_cluster(nodes=2, per_node=1, network=False)
    assert "inter_node_gbps = None" in str(reason(hand_graph, two, cluster=no_network))
    mixed = make_cluster(per_node=1)
    mixed = mixed.model_copy(update={"groups": (*mixed.groups, *mixed.groups)})
    assert "cluster.groups" in str(reason(hand_graph, two, cluster=mixed))
    only_fp32 = mixed.groups[0].model_copy(
        update={"device": mixed.groups[0].device.model_copy(update={"peak_flops_per_s": {"fp32": 1e12}})}
    )
    text = reason(hand_graph, {}, cluster=mixed.model_copy(update={"groups": (only_fp32,)}))
    assert text is not None
    assert text.startswith("job.precision = 'bf16'")
    assert "valid: fp32" in text


def test_each_engine_has_its_own_rules(hand_graph):
    split = {"tensor_parallel_degree": 2, "enable_sequence_parallel": True}
    cluster = make_cluster(per_node=2)
    assert reason(hand_graph, split, cluster=cluster, engine=EngineChoice(name="megatron")) is None
    refused = reason(hand_graph, split, cluster=cluster, engine=EngineChoice(name="deepspeed"))
    assert "enable_sequence_parallel" in str(refused)


@pytest.mark.slow
def test_experts_that_no_grouped_product_shows_are_not_shared():
    keys = {"model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64}
    keys |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 64,
    }
    job = Job(sequence_length=16, global_batch_size=4, precision="bf16")
    layout = Parallelism(data_parallel_shard_degree=2, expert_parallel_degree=2)
    reason = illegal(analyze(keys, job), make_cluster(per_node=2), job, layout, EngineChoice())
    assert reason is not None
    assert reason.startswith("expert_parallel_degree = 2: no block of the model multiplies tokens with stacked experts")


FP8 = Job(sequence_length=64, global_batch_size=16, precision="fp8")


def test_parts_of_products_in_8_bits(hand_graph):
    """The weights of the hand-made block are [128, 32] and [32, 128], so 8 parts of 16 is what it can be cut into."""
    graph = replace(hand_graph, config={})
    assert products(graph, FP8, Parallelism(tensor_parallel_degree=8), EngineChoice()) is None
    text = products(graph, FP8, Parallelism(tensor_parallel_degree=16), EngineChoice())
    assert text is not None
    assert text.startswith("tensor_parallel_degree = 16: would cut the 128 of up.weight into parts of 8")
    assert text.endswith("multiples of 16 (valid: 1, 2, 4, 8)")
    assert products(graph, JOB, Parallelism(tensor_parallel_degree=16), EngineChoice()) is None
    assert products(graph, FP8, Parallelism(tensor_parallel_degree=16), EngineChoice(name="megatron")) is None
    of_others = replace(graph, config={"num_experts": 128})  # then up is a router, and down has no partner
    assert products(of_others, FP8, Parallelism(tensor_parallel_degree=8), EngineChoice()) is None


def test_a_model_without_products_in_8_bits(hand_graph, mlp_block):
    odd = tuple(replace(p, shape=tuple(size + 1 for size in p.shape)) for p in mlp_block.parameters)
    graph = replace(hand_graph, blocks=(replace(mlp_block, parameters=odd),))
    text = products(graph, FP8, Parallelism(), EngineChoice())
    assert text == (
        "precision = 'fp8': the blocks have no linear layer whose dims are multiples of 16 (valid: bf16, fp32)"
    )


@pytest.mark.slow
def test_the_search_leaves_out_what_a_worker_would_refuse():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    graph = analyze(
        {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 128, **sizes}, Job(sequence_length=16)
    )
    job = Job(sequence_length=16, global_batch_size=8, precision="fp8")
    found = search(graph, "1x4xH100-SXM-80GB", job, keep=1000)
    assert {plan.parallelism.tensor_parallel_degree for plan in found.plans} == {1, 2}
    assert "products in 8 bits" in [rule.name for rule in found.certificate.rules]
    with pytest.raises(BadInput, match=r"tensor_parallel_degree = 4: would cut the 96 of mlp.*\(valid: 1, 2\)"):
        search(graph, "1x4xH100-SXM-80GB", job, constraints={"tensor_parallel_degree": 4})
