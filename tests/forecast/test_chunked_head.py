"""The end of a model in chunks: the work of a chunk so many times, and the memory of one."""

import pytest

from ahp.engines.ahp import AhpEngine
from ahp.engines.torchtitan import TorchtitanEngine
from ahp.forecast.axes import Axes
from ahp.forecast.chunked_head import chunks, num_chunks
from ahp.forecast.communication import Network
from ahp.forecast.group import Group
from ahp.forecast.units import UnitPricer
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

WORDS, WIDTH, TOKENS = 100, 32, 64


def head(graph, chunk, **layout):
    nodes = make_cluster().groups[0]
    choice = EngineChoice(loss_chunk_tokens=chunk)
    traits = AhpEngine().traits(Job(precision="bf16"), Parallelism(**layout), choice)
    return UnitPricer(graph, nodes, Network(nodes), "bf16").units(1, Axes(), traits).head


def test_memory_by_hand(hand_graph):
    whole, chunked = head(hand_graph, None), head(hand_graph, 16)
    weights = WORDS * WIDTH
    assert whole.memory.saved == TOKENS * WORDS * 2  # the logits
    assert (
        chunked.memory.saved == TOKENS * WIDTH * 2 + weights * 4
    )  # gradients of hidden states, and of the head in fp32
    of_whole = whole.memory.saved + max(whole.memory.forward_extra, whole.memory.backward_extra)
    of_chunk = chunked.memory.forward_extra - weights * 2  # a chunk's own gradient of the head, in bf16
    assert of_chunk == of_whole / 4
    assert chunked.memory.backward_extra == weights * 2  # the sum in bf16 again


def test_the_work_is_that_of_all_chunks_in_the_forward_pass(hand_graph):
    whole, chunked = head(hand_graph, None).times, head(hand_graph, 16).times
    assert chunked.weight_gradient.device_s == 0
    both = whole.forward_s + whole.backward_s
    assert chunked.forward_s > both  # the head's weights are read for each chunk, and its gradients added up
    assert chunked.forward.launches > 4 * (whole.forward.launches + whole.weight_gradient.launches)


def test_torchtitans_chunks_are_eighths_of_a_ranks_tokens(hand_graph):
    def titan(version, axes):
        traits = TorchtitanEngine().traits(
            Job(precision="bf16"), Parallelism(), EngineChoice(name="torchtitan", version=version)
        )
        nodes = make_cluster().groups[0]
        return UnitPricer(hand_graph, nodes, Network(nodes), "bf16").units(1, axes, traits).head.memory

    for ranks in (1, 2):
        axes = Axes(context=Group(ranks, ranks, 1))
        whole, chunked = titan("2026-04-26", axes), titan("2026-04-27", axes)
        of_chunk = chunked.forward_extra - WORDS * WIDTH * 2
        of_whole = whole.saved + max(whole.forward_extra, whole.backward_extra)
        assert of_chunk == pytest.approx(of_whole / 8, rel=1e-3)


@pytest.mark.parametrize("chunk", [1, 16, 64, 1000])
def test_smaller_chunks_take_longer_and_less(hand_graph, chunk):
    small, large = head(hand_graph, max(1, chunk // 2)), head(hand_graph, chunk)
    assert small.times.forward_s >= large.times.forward_s
    assert small.memory.forward_extra <= large.memory.forward_extra


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16, 17, 40, 1000])
def test_every_token_is_in_one_chunk(tokens: int) -> None:
    batch, sequence = 5, 8
    found = [
        [(row, column) for row in range(batch)[rows] for column in range(sequence)[columns]]
        for rows, columns in chunks(batch, sequence, tokens)
    ]
    assert sorted(token for chunk in found for token in chunk) == [
        (row, column) for row in range(batch) for column in range(sequence)
    ]
    assert max(map(len, found)) <= tokens
    assert num_chunks(batch, sequence, tokens) == len(found)


def test_chunks_are_even() -> None:
    assert chunks(1, 10, 9) == [(slice(0, 1), slice(0, 5)), (slice(0, 1), slice(5, 10))]
    assert [rows for rows, _ in chunks(5, 8, 33)] == [slice(0, 2), slice(2, 5)]
