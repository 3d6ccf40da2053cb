"""Stages of their own width: each priced as in a layout of its width, and what passes between them by who has it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ahp.cluster.cells import Cell, first_devices, place
from ahp.cluster.model import Link
from ahp.errors import BadInput
from ahp.forecast import rules, timeline
from ahp.forecast.mixed_network import MixedNetwork
from ahp.forecast.priced import Priced
from ahp.forecast.step import price
from ahp.plan import Parallelism

from .test_mixed import JOB, NETWORK, faster, group, mixed

SLOW = Link(bandwidth_bytes_per_s=1e9, latency_s=5e-5)


def layout(*widths: tuple[int, int] | None, **others: Any) -> Parallelism:
    """One stage on the group a, the next on b, and so on; shard and tensor degree of each, None = as the layout."""
    stages = [
        {"group": name, "layers": 2}
        | ({} if width is None else {"data_parallel_shard_degree": width[0], "tensor_parallel_degree": width[1]})
        for name, width in zip("abc", widths, strict=False)
    ]
    return Parallelism(pipeline_parallel_degree=len(widths), stages=stages, **{"micro_batch_size": 2, **others})


def cluster(link: Link = NETWORK):
    return mixed(group("a", 2, 4), group("b", 2, 4, **faster(3.0)), link=link)


def priced(graph, wanted: Parallelism, link: Link = NETWORK) -> Priced:
    return price(graph, cluster(link), JOB, wanted)


def test_widths_that_are_the_layouts_change_nothing(tiny):
    said, unsaid = (
        layout((2, 2), (2, 2), data_parallel_shard_degree=2, tensor_parallel_degree=2),
        layout(None, None, data_parallel_shard_degree=2, tensor_parallel_degree=2),
    )
    assert priced(tiny, said).forecast == priced(tiny, unsaid).forecast


@pytest.mark.parametrize(
    "others",
    [{}, {"data_parallel_replicate_degree": 2}, {"context_parallel_degree": 2, "context_parallel_method": "ring"}],
)
@pytest.mark.parametrize("widths", [((1, 4), (1, 1)), ((2, 1), (1, 2)), ((1, 1), (2, 2))])
def test_a_stage_costs_what_it_does_in_a_layout_of_its_width(tiny, widths, others):
    found = priced(tiny, layout(*widths, zero_stage=1, **others))
    for number, (shard, tensor) in enumerate(widths):
        keys = {
            "data_parallel_shard_degree": shard,
            "zero_stage": 1 if shard > 1 or "context_parallel_degree" in others else 0,
            "micro_batch_size": 2 // shard,
        }
        alike = priced(tiny, layout(None, None, tensor_parallel_degree=tensor, **others, **keys))
        assert found.stages[number] == alike.stages[number]
        assert found.memory.kept[number] == alike.memory.kept[number]
        assert found.memory.weights.total[number] == alike.memory.weights.total[number]


def test_the_fullest_rank_is_judged_at_its_own_width(tiny):
    widths = ((1, 1), (1, 1)), ((1, 4), (1, 1)), ((1, 1), (1, 4))
    # Processor cores: communicators of a GPU take more than this model.
    cores = mixed(group("a", 2, 4, name="cpu"), group("b", 2, 4, name="cpu", **faster(3.0)))
    plain, first, last = (price(tiny, cores, JOB, layout(*each)).forecast for each in widths)
    assert [one.fullest_rank for one in (plain, first, last)] == [0, 4, 0]
    assert last.memory_allocated_bytes == plain.memory_allocated_bytes > first.memory_allocated_bytes
    for one in (plain, first, last):
        assert sum(one.step.values()) == pytest.approx(one.step_time_s)


def test_every_rank_hands_over_its_share():
    network = MixedNetwork(cluster(SLOW))
    one, other = Cell("a", 1, 4, 0, 0, 0), Cell("b", 4, 4, 0, 1, 1)
    same = Cell("b", 1, 4, 0, 1, 1)
    own = _Counted()
    alone = network.handed_s(own, one, same, 8e6)
    shared = network.handed_s(own, one, other, 8e6)
    assert shared == alone  # the one rank sends all of it, whoever takes it
    assert network.handed_s(own, Cell("a", 4, 4, 0, 0, 0), other, 8e6) < alone / 2
    network.handed_s(own, Cell("a", 2, 4, 0, 0, 0), Cell("a", 1, 4, 2, 2, 2), 8e6)
    assert own.asked == [8e6]


class _Counted:
    def __init__(self) -> None:
        self.asked: list[float] = []

    def time_s(self, kind: str, num_bytes: float, group: object) -> float:
        self.asked.append(num_bytes)
        return 0.0


def test_receivers_that_hold_hidden_states_whole_gather_them(tiny):
    plain = priced(tiny, layout((1, 1), (1, 4)), SLOW)
    sequence = priced(tiny, layout((1, 1), (1, 4), enable_sequence_parallel=True), SLOW)
    (there, _), (back, _) = ((one.span.times[0].send_forward_s, one) for one in (plain, sequence))
    assert there > back
    # Gradients go to the one rank, which gathers nothing.
    assert plain.span.times[1].send_backward_s == sequence.span.times[1].send_backward_s == back


def test_context_ranks_hand_over_their_tokens(tiny):
    keys = {"context_parallel_degree": 2, "context_parallel_method": "ring", "enable_sequence_parallel": True}
    alike, unlike = (priced(tiny, layout(*widths, **keys), SLOW) for widths in ([(1, 2)] * 2, [(1, 2), (1, 1)]))
    whole = priced(tiny, layout((1, 2), (1, 1), enable_sequence_parallel=True), SLOW)
    sent, of_alike, of_whole = (one.span.times[0].send_forward_s for one in (unlike, alike, whole))
    assert (
        of_alike < sent < of_whole
    )  # of twice the tensor ranks each sends half as much, and of all tokens twice as much


def test_all_stages_see_tokens_in_one_way(tiny):
    # The 8 heads go over the 4 context ranks of the first stage, and not over the 16 ranks of the last.
    larger, keys = mixed(group("a", 2, 4), group("b", 4, 4)), {"context_parallel_degree": 4, "micro_batch_size": 2}
    chosen = price(tiny, larger, JOB, layout((1, 1), (1, 4), **keys)).parallelism
    assert chosen.context_parallel_method == "ring"
    with pytest.raises(BadInput, match=r"context_parallel_method = 'all-to-all'.*= 16 does not divide 8"):
        price(tiny, larger, JOB, layout((1, 1), (1, 4), context_parallel_method="all-to-all", **keys))


def test_cells_of_several_widths_follow_each_other_on_nodes():
    nodes = group("g", 3, 4)
    assert first_devices(nodes, [2, 4, 1, 1]) == [0, 4, 8, 9]
    assert first_devices(nodes, [3, 2, 2]) == [0, 4, 6]
    assert first_devices(nodes, [1, 8]) == [0, 4]
    assert first_devices(nodes, [1, 8, 1]) is None
    assert first_devices(nodes, [6]) is None
    wanted = Parallelism(
        pipeline_parallel_degree=3,
        data_parallel_replicate_degree=2,
        stages=[
            {"group": "b", "layers": 1, "tensor_parallel_degree": 4},
            {"group": ["a", "b"], "layers": 2},
            {"group": "a", "layers": 1, "tensor_parallel_degree": 2},
        ],
    )
    found = place(mixed(group("a", 2, 4), group("b", 3, 4)), wanted)
    assert found.used == {"a": 5, "b": 9}
    assert [[(cell.group, cell.first_rank, cell.node_of(0)) for cell in row] for row in found.cells] == [
        [("b", 0, 0), ("a", 8, 0), ("a", 10, 0)],
        [("b", 4, 1), ("b", 9, 2), ("a", 12, 1)],
    ]
    assert [found.group_of(rank) for rank in (0, 7, 8, 9, 10, 13)] == ["b", "b", "a", "b", "a", "a"]
    assert found.workers == [5, 6, 7, 8, 9, 10, 11, 12, 0, 13, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (layout((1, 3), (1, 1)), ["stages.tensor_parallel_degree = 3", "num_attention_heads 8", "valid: 1, 2, 4"]),
        (layout((1, 8), (1, 1), data_parallel_replicate_degree=2), ["stages.group = 'a'", "2 cells of 8 devices", "at most 1"]),
        (
            Parallelism(
                pipeline_parallel_degree=3,
                stages=[
                    {"group": "a", "layers": 1},
                    {"group": "a", "layers": 1, "tensor_parallel_degree": 8},
                    {"group": "b", "layers": 2},
                ],
            ),
            ["stages.group = 'a'", "cells of 1, 8 devices", "2 nodes of 4 devices"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_the_users_words(tiny, wanted, words):
    with pytest.raises(BadInput) as refusal:
        priced(tiny, wanted)
    for word in words:
        assert word in str(refusal.value)


def test_tensor_ranks_hand_over_equal_parts_of_a_sequence():
    job = JOB.model_copy(update={"sequence_length": 100})
    assert rules.unlike_widths(job, layout((1, 4), (1, 1))) is None
    assert rules.unlike_widths(job, layout(None, None, tensor_parallel_degree=8)) is None
    told = rules.unlike_widths(job, layout((1, 8), (1, 1)))
    assert told == (
        "stages.tensor_parallel_degree = 8: each of its ranks sends a part of sequence_length 100, which it does not divide "
        "(nearest: 1, 2, 4, 5, 10)"
    )


def test_the_balance_loss_of_experts_is_refused(tiny):
    experts = dataclasses.replace(tiny, config={**tiny.config, "num_experts": 4})
    assert rules.unlike_widths(experts, layout((1, 2), (1, 1))) is None
    balanced = dataclasses.replace(experts, config={**experts.config, "balance_loss": True})
    assert rules.unlike_widths(balanced, layout((1, 2), (1, 1))) == rules.BALANCE_OF_UNLIKE_WIDTHS


def test_a_timeline_draws_every_rank_of_every_stage(tiny):
    found = priced(tiny, layout((1, 1), (1, 4), data_parallel_replicate_degree=2))
    events = json.loads(json.dumps(timeline.chrome_trace(found, all_ranks=True)))["traceEvents"]
    assert {event["pid"] for event in events} == set(range(10))
    few = json.loads(json.dumps(timeline.chrome_trace(found)))["traceEvents"]
    names = [event["args"]["name"] for event in few if event["name"] == "process_name"]
    assert any("stands for ranks 2 to 5 (4)" in name for name in names)
