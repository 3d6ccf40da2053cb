"""Operands of successive calls lie in different places, and no operand in a cache."""

import itertools
import weakref

import torch

from ahp.cluster.operands import ALIGN, Operands

CPU = torch.device("cpu")


def test_every_call_has_its_own_place_until_all_memory_was_used() -> None:
    operands = Operands(2**16, CPU).of(torch.float32, (8, 16), (4, 16))
    sets = list(itertools.islice(operands, 200))
    places = [(x.data_ptr(), w.data_ptr()) for x, w in sets]
    count = 2**16 // 4 // (8 * 16 + 4 * 16)
    assert len(set(places)) == count
    assert places[0] == places[count]
    assert all(x.shape == (8, 16) and w.shape == (4, 16) for x, w in sets)
    starts = sorted({place for pair in places for place in pair})
    assert all(later - earlier >= 4 * 4 * 16 for earlier, later in itertools.pairwise(starts))
    assert all((start - starts[0]) % (4 * ALIGN) == 0 for start in starts)


def test_tensors_larger_than_the_memory_are_made_alone() -> None:
    operands = Operands(1024, CPU).of(torch.bfloat16, (64, 64), (64, 64))
    first, second = next(operands), next(operands)
    assert first[0].data_ptr() == second[0].data_ptr() != first[1].data_ptr()
    assert first[0].dtype == torch.bfloat16


def test_results_are_kept_until_there_are_so_many_bytes_of_them_and_then_dropped_together() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def call() -> tuple[torch.Tensor, ...]:
        made = torch.zeros(64), torch.zeros(64)
        alive.append(weakref.ref(made[0]))
        return made

    timed = Operands(4 * 2 * 64 * 4, CPU).kept(call)  # four times two tensors
    counts = []
    for _ in range(9):
        timed()
        counts.append(sum(ref() is not None for ref in alive))
    assert counts == [2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_one_result_is_kept_where_it_is_more_than_that() -> None:
    timed = Operands(0, CPU).kept(lambda: torch.zeros(64))
    timed()
    timed()
