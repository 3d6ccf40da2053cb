"""Tokens on their way to experts on other ranks: what is sent once to a node, and what another micro-batch hides."""

import itertools
import math
import random

import pytest

from ahp.cluster import catalogue
from ahp.engines.traits import ExpertTraits
from ahp.errors import NotExpressible
from ahp.forecast.axes import has_opposite_pass
from ahp.forecast.dispatch import Routed, all_to_all_s, arrived_bytes, copied_s, numbers_s, pass_waits_s, sorted_s
from ahp.forecast.efficiency import Rates
from ahp.forecast.gpu import Gpu
from ahp.forecast.group import Group
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.step import simulate
from ahp.graph.operators import Operator, TensorSpec
from ahp.plan import Parallelism

RANKS_OF_FOUR = 8 * (1 - math.comb(14, 4) / math.comb(16, 4))
"""Ranks that a token goes to which has four of 16 experts, two on each rank."""
EIGHT_OF_64 = Routed(num_bytes=8.0, per_token=8, num_experts=64, row_bytes=1)
MIXTURE = {
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 1024, "num_local_experts": 16, "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
}  # fmt: skip


class OneByteASecond:
    """Of all that a rank sends, what goes to other ranks of the group."""

    def time_s(self, kind, num_bytes, group):
        assert kind == "all_to_all"
        return num_bytes * (group.size - group.local if group.nodes > 1 else group.size - 1) / group.size


def test_a_place_gets_a_token_once_however_many_of_its_experts_it_is_for():
    counted, places, experts = 0, 4, 8
    routes = list(itertools.combinations(range(experts), 3))
    for route in routes:
        counted += len({expert * places // experts for expert in route})
    assert Routed(3.0, 3, experts, 1).share_sent_once(places) == pytest.approx(counted / len(routes) / 3)


def test_with_an_expert_on_each_place_nothing_is_sent_twice():
    assert EIGHT_OF_64.share_sent_once(64) == pytest.approx(1.0)
    assert EIGHT_OF_64.share_sent_once(1) == pytest.approx(1 / 8)


def test_shares_grow_with_the_places():
    draw = random.Random(0)
    for _ in range(200):
        experts = 2 ** draw.randint(1, 8)
        routed = Routed(1.0, draw.randint(1, experts), experts, 1)
        shares = [routed.share_sent_once(2**k) for k in range(experts.bit_length())]
        assert all(0 < a <= b * (1 + 1e-12) <= 1 + 1e-9 for a, b in itertools.pairwise(shares))


def test_nodes_get_a_token_once_and_forward_it():
    network, nodes = OneByteASecond(), Group(32, 8, 4)
    each_s = all_to_all_s(EIGHT_OF_64, nodes, network, ExpertTraits())
    assert each_s == pytest.approx(8 * 24 / 32)
    once_s = all_to_all_s(EIGHT_OF_64, nodes, network, ExpertTraits(tokens_once_to_a_node=True))
    # Forwarding takes longer here, where NVLink is no faster than the network.
    within_s = 8 * EIGHT_OF_64.share_sent_once(32) * 7 / 8
    assert once_s == pytest.approx(max(each_s * EIGHT_OF_64.share_sent_once(4), within_s)) == pytest.approx(within_s)
    one_node = Group(8, 8, 1)
    assert all_to_all_s(EIGHT_OF_64, one_node, network, ExpertTraits(tokens_once_to_a_node=True)) == pytest.approx(7.0)
    to_ranks_s = all_to_all_s(EIGHT_OF_64, one_node, network, ExpertTraits(tokens_once_to_a_rank=True))
    assert to_ranks_s == pytest.approx(7.0 * EIGHT_OF_64.share_sent_once(8))


def test_what_arrives_is_one_row_for_each_rank_where_tokens_are_sent_once():
    group, tokens = Group(8, 8, 1), EIGHT_OF_64.num_bytes / EIGHT_OF_64.per_token
    assert arrived_bytes(EIGHT_OF_64, group, ExpertTraits()) == 2 * EIGHT_OF_64.num_bytes
    once = arrived_bytes(EIGHT_OF_64, group, ExpertTraits(tokens_once_to_a_rank=True, keeps_sums=True))
    assert once == pytest.approx(8 * (1 - math.comb(56, 8) / math.comb(64, 8)) * tokens + tokens)


def test_numbers_of_four_bytes_are_sent_for_each_copy():
    routed, group = Routed(num_bytes=64.0, per_token=2, num_experts=4, row_bytes=16), Group(4, 4, 1)
    assert numbers_s(routed, group, OneByteASecond(), ExpertTraits()) == 0
    # Three messages in two passes, of four bytes for each of four copies; three of four ranks are others.
    once_s = OneByteASecond().time_s("all_to_all", 16.0, group)
    assert numbers_s(routed, group, OneByteASecond(), ExpertTraits(numbers_sent=3)) == pytest.approx(1.5 * once_s)


def test_what_is_sent_beside_the_opposite_pass_slows_it_down():
    def waits_s(passes_s, overlap, nodes=2):
        group, routed = Group(4, 4 // nodes, nodes), Routed(num_bytes=2.0, per_token=1, num_experts=4, row_bytes=1)
        return pass_waits_s(routed, group, OneByteASecond(), passes_s, ExpertTraits(), overlap=overlap)

    # Half of two bytes crosses the network, there and back.
    assert waits_s(200.0, 1.0) == pytest.approx(2 * CONTENTION)
    assert waits_s(2.0, 1.0) == pytest.approx(1 + CONTENTION)
    assert waits_s(200.0, 0.0) == 2.0
    assert waits_s(200.0, 1.0, nodes=1) == pytest.approx(3 * CONTENTION)
    assert waits_s(200.0, 0.0, nodes=1) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("keys", "has"),
    [
        ({}, True),
        ({"pipeline_parallel_degree": 2}, False),
        ({"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2}, True),
        ({"activation_checkpoint": "full"}, False),
    ],
)
def test_which_layouts_have_an_opposite_pass(keys, has):
    assert has_opposite_pass(Parallelism(**keys)) == has


def experts_s(nodes: int, engine: str | dict[str, object] = "megatron", **keys: object) -> float:
    """Seconds that a step waits for tokens between ranks that have two experts each."""
    layout = {
        "data_parallel_shard_degree": 8,
        "zero_stage": 1,
        "expert_parallel_degree": 8,
        "activation_checkpoint": "none",
    }
    found = simulate(
        model=MIXTURE,
        cluster={"nodes": nodes, "devices_per_node": 8 // nodes, "device": "H100-SXM-80GB", "inter_node_gbps": 100},
        job={"sequence_length": 1024, "global_batch_size": 64, "precision": "bf16"},
        parallelism=layout | keys,
        engine=engine,
    )
    return found.step["expert_parallel"]


@pytest.mark.slow
def test_only_between_nodes_an_engine_sends_once_and_beside_other_passes():
    # Two nodes: of four experts of a token all are on one node in 1 of 13 cases, so that most go to both, once.
    assert experts_s(2) < 0.5 * experts_s(2, engine="torchtitan")
    flex = {"name": "megatron", "moe_token_dispatcher_type": "flex", "overlap_moe_expert_parallel_comm": False}
    assert experts_s(1, engine=flex) < experts_s(1, engine="torchtitan")
    # Full recompute sends again, and beside nothing.
    assert experts_s(2, activation_checkpoint="full") > 1.5 * experts_s(2)


def test_megatron_and_torchtitan_sort_what_has_arrived_by_expert_and_back():
    """In four layers and both passes, two kernels read and write four copies of 8,192 tokens of 1,024 elements."""
    moved = 4 * 2 * 2 * 2 * (4 * 8192 * 1024 * 2)
    rate = Gpu(catalogue.find("H100-SXM-80GB").device).bytes_per_s
    megatron_s, titan_s = (
        experts_s(1, engine={"name": of, "compile": of == "torchtitan"}) for of in ("megatron", "torchtitan")
    )
    numbers_s = (megatron_s - titan_s) / 2  # three messages instead of one
    assert titan_s - experts_s(1, engine="deepspeed") == pytest.approx(moved / rate + numbers_s)
    copies = Operator(0, "aten._grouped_mm", "", "forward", (TensorSpec((8, 4), "bfloat16"), TensorSpec((4, 4, 4), "bfloat16")), (), (), (), 1, 0, 0)  # fmt: skip
    sorts, rates = ExpertTraits(sorts_arrived=True), Rates(catalogue.find("H100-SXM-80GB").device, None, 1)
    assert sorted_s(copies, 0.5, Group(2, 2, 1), sorts, rates) == pytest.approx(4 * 0.5 * 64 / rate)
    assert sorted_s(copies, 0.5, Group(4, 4, 1), sorts, rates) == 0  # one expert a rank
    assert sorted_s(copies, 0.5, Group(2, 2, 1), ExpertTraits(), rates) == 0


def test_megatrons_own_flags_say_how_tokens_travel():
    def waits_s(nodes: int, **flags: object) -> float:
        return experts_s(nodes, {"name": "megatron"} | flags)

    sends, beside = "moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm"
    assert waits_s(2) == waits_s(2, **{sends: "flex", beside: True})
    alone_s = waits_s(2, **{sends: "flex", beside: False})
    assert waits_s(2) < alone_s  # what the opposite pass is long enough to hide
    # All but 1 of 13 tokens have experts on both nodes, so that one copy crosses in place of two of four on average.
    assert 1.5 * alone_s < waits_s(2, **{sends: "alltoall", beside: False}) < 2.5 * alone_s
    # On one node NCCL sends if nothing is asked for, and beside the opposite pass only if that is.
    assert waits_s(1) == waits_s(1, **{sends: "alltoall", beside: False}) > 1.5 * waits_s(1, **{beside: True})
    # DeepEP sends a token to a rank once for all of its experts there; what does not depend on bytes stays. deepspeed sorts nothing.
    assert RANKS_OF_FOUR / 4 < waits_s(1, **{sends: "flex", beside: False}) / experts_s(1, "deepspeed") < 0.98


def test_deepep_of_torchtitan_sends_a_token_once_and_sorts_nothing():
    def waits_s(nodes: int, sends: str | None) -> float:
        return experts_s(nodes, {"name": "torchtitan", "compile": True, "moe_token_dispatcher_type": sends})

    of_megatron = {"name": "megatron", "overlap_moe_expert_parallel_comm": False, "moe_token_dispatcher_type": "flex"}
    for nodes in (1, 2):
        assert waits_s(nodes, "flex") == pytest.approx(experts_s(nodes, of_megatron))
        assert waits_s(nodes, None) == waits_s(nodes, "alltoall") > 1.1 * waits_s(nodes, "flex")


@pytest.mark.slow
def test_a_graph_launches_attention_and_router_in_place_of_the_host():
    def host_s(parts: list[str] | None, **keys: object) -> float:
        engine = {"name": "megatron", "cuda_graph_modules": parts}
        job = {"sequence_length": 256, "global_batch_size": 64, "precision": "bf16"}
        layout = {"data_parallel_shard_degree": 8, "zero_stage": 1, "expert_parallel_degree": 8} | keys
        return simulate(model=MIXTURE, cluster="1x8xH100-SXM-80GB", job=job, parallelism=layout, engine=engine).step[
            "host"
        ]

    none, attention, both = host_s(None), host_s(["attn"]), host_s(["attn", "moe_router"])
    assert none > attention > both > 0.3 * none  # the experts' own launches stay
    assert host_s(["moe_router"]) > attention
    with pytest.raises(
        NotExpressible, match=r"engine.cuda_graph_modules = \['attn'\].*valid: null; or activation_checkpoint"
    ):
        host_s(["attn"], activation_checkpoint="full")


def in_8_bits(device: str, version: str | None = None, engine: str = "megatron", **keys: object):
    layout = {
        "data_parallel_shard_degree": 8,
        "zero_stage": 1,
        "expert_parallel_degree": 8,
        "activation_checkpoint": "none",
    }
    return simulate(
        model=MIXTURE, cluster=f"1x8x{device}", job={"sequence_length": 1024, "global_batch_size": 64, "precision": "fp8"},
        parallelism=layout | keys, engine={"name": engine, "version": version},
    ).step  # fmt: skip


@pytest.mark.slow
def test_in_mxfp8_recipes_of_megatron_run_one_graph_and_hide_tokens_on_a_node():
    new, old = in_8_bits("GB200-NVL72", "26.06"), in_8_bits("GB200-NVL72", "26.04")
    plain = in_8_bits("GB200-NVL72")  # nobody asks for a recipe: it has the loss of Megatron-LM itself too
    assert plain["expert_parallel"] == old["expert_parallel"]
    assert plain["host"] > 0
    assert plain["forward"] > old["forward"]
    assert new.get("host", 0.0) == 0.0 < old["host"]
    assert new["expert_parallel"] < 0.5 * old["expert_parallel"]
    assert new["forward"] < old["forward"]
    # Nothing else hides them: not without an opposite pass, nor on Hopper, whose 8 bits are no MXFP8.
    full = in_8_bits("GB200-NVL72", "26.06", activation_checkpoint="full")
    assert full["expert_parallel"] > 2 * new["expert_parallel"]
    assert in_8_bits("H100-SXM-80GB", "26.06") == in_8_bits("H100-SXM-80GB", "26.04")
    assert in_8_bits("H100-SXM-80GB")["host"] > 0


def test_before_dropless_routing_experts_hold_the_host_up_less():
    assert in_8_bits("H100-SXM-80GB", "25.09")["host"] < in_8_bits("H100-SXM-80GB", "25.11")["host"]


@pytest.mark.slow
def test_the_device_waits_while_the_host_prepares_experts():
    # Of four layers and eight micro-batches, at the least, however long they compute: 33 operators of 7.3 x 5 us each.
    stalled_s = 33 * 7.3 * 5e-6 * 4 * 8
    assert in_8_bits("H100-SXM-80GB", "26.04", micro_batch_size=1)["host"] >= stalled_s
    dense = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 4, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 1024, "max_position_embeddings": 8192}  # fmt: skip
    found = simulate(
        model=dense, cluster="1x8xH100-SXM-80GB", job={"sequence_length": 8192, "global_batch_size": 8, "precision": "fp8"},
        parallelism={"data_parallel_shard_degree": 8, "zero_stage": 1}, engine={"name": "megatron"},
    )  # fmt: skip
    assert "host" not in found.step


@pytest.mark.parametrize("experts", [1, 2, 8])
def test_experts_one_after_another_copy_what_autograd_copies(experts):
    """Megatron-LM d0f13074a5, core/transformer/moe/experts.py, SequentialMLP: its copies, counted in bytes as autograd makes them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Moved(TorchDispatchMode):
        """Tensors that each operator reads and writes, in bytes."""

        num_bytes = 0.0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
            read = [one for one in args if isinstance(one, torch.Tensor)]
            if name in ("copy_", "clone", "zeros_like", "add"):
                size = sum(one.nbytes for one in read[-1:]) + made.nbytes
                self.num_bytes += made.nbytes if name == "zeros_like" else size + (made.nbytes if name == "add" else 0)
            elif name == "slice_backward":
                self.num_bytes += made.nbytes + 2 * args[0].nbytes
            return made

    of_each, hidden = 4, 3
    tokens = torch.ones(experts * of_each, hidden, requires_grad=True)
    gradient = torch.ones_like(tokens)
    with Moved() as forward:
        results = torch.zeros_like(tokens)
        for start in range(0, experts * of_each, of_each):
            results[start : start + of_each] = tokens[start : start + of_each].mul(2.0)
    with Moved() as backward:
        results.backward(gradient)

    copies, weights = TensorSpec(tuple(tokens.shape), "float32"), TensorSpec((experts, hidden, hidden), "float32")
    grouped = Operator(0, "aten._grouped_mm", "", "forward", (copies, weights), (copies,), (), (), 1, 0, 0)
    found = copied_s(grouped, 1.0, 1, bytes_per_s=1.0)
    assert found == pytest.approx((forward.num_bytes, backward.num_bytes))
