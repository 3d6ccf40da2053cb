"""Memory for messages between stages is what the orders of torch's patterns ask for, and does not grow with micro-batches where none waits."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import ahp
from ahp.forecast.stage_memory import received_bytes
from ahp.graph.operators import ModelGraph
from ahp.schedule.messages import waiting
from ahp.schedule.patterns import illegal, make
from ahp.schedule.registry import SCHEDULES, get
from tests.schedule.random_orders import random_order, random_placement


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_of_a_pattern_waits_for_more_messages_at_once_than_it_has_memory_for(name: str) -> None:
    tried = 0
    for p, v in ((2, 1), (3, 1), (8, 1), (2, 2), (3, 2), (4, 2), (8, 2), (4, 3), (3, 4)):
        for m in (1, p, 2 * p, 5 * p + 1):
            if illegal(name, p, v, m) is None:
                tried += 1
                own = get(name).placement.rank_stages(p, v)
                most = np.array(waiting(make(name, p, v, m)))
                room = received_bytes(own, p, 1, m, "waiting")
                assert (most <= room).all(), (p, v, m)
                assert v > 1 or (room <= most + 1).all(), "an output and a gradient, though not always at once"
                assert (received_bytes(own, p, 1, m, "one") <= room).all(), "what bounds count"
                assert (room <= received_bytes(own, p, 1, m, "all")).all()
    assert tried


def test_an_order_has_memory_for_what_it_asks_for() -> None:
    random = Random(2)
    for _ in range(50):
        schedule = random_order(random, random_placement(random, 3, 6), 5)
        own = np.full((3, 2), 1)
        assert received_bytes(own, 3, 7, 5, "waiting", schedule).tolist() == [7 * max(n, 4) for n in waiting(schedule)]


@pytest.fixture
def buffers(hand_graph: ModelGraph) -> Callable[..., int]:
    def found(engine: str, batch: int, device: str = "H100-SXM-80GB", **layout: Any) -> int:
        forecast = ahp.simulate(
            model=hand_graph,
            cluster={"nodes": 1, "devices_per_node": 2, "device": device},
            job={"sequence_length": 64, "global_batch_size": batch, "precision": "fp32"},
            parallelism={"pipeline_parallel_degree": 2, "micro_batch_size": 1, **layout},
            engine={"name": engine},
        )
        return forecast.memory["pipeline_buffers"]

    return found


def test_only_torchs_own_buffers_grow_with_the_number_of_micro_batches(buffers: Callable[..., int]) -> None:
    assert buffers("ahp", 64) == buffers("ahp", 4) > 0
    assert buffers("torchtitan", 64) == 16 * buffers("torchtitan", 4) == 64 * buffers("ahp", 4)


def test_cpu_workers_ask_for_all_messages_first(buffers: Callable[..., int]) -> None:
    assert buffers("ahp", 64, "cpu") == 16 * buffers("ahp", 4, "cpu")


def test_an_order_of_its_own_is_priced_by_its_messages(buffers: Callable[..., int]) -> None:
    ahead = ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")
    keys = {"pipeline_parallel_schedule": "Synthesized", "pipeline_parallel_order": ahead}
    assert buffers("ahp", 2, **keys) == buffers("ahp", 2)
