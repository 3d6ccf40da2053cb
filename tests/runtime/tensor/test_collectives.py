"""How parts of a tensor are laid out for the collectives of tensor parallelism: the parts that were meant, with no copy too many."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ahp.runtime.tensor.collectives import cut_rows, cut_segments, join_rows
from ahp.search.slicing.placement import Split
from tests.runtime.workers import Pool

SPLITS = {
    "rows": ((4, 6), Split(0, (4,))),
    "sequence": ((3, 8, 5), Split(1, (8,))),
    "sequence of one": ((1, 8, 5), Split(1, (8,))),
    "last": ((2, 3, 4), Split(2, (4,))),
    "packed": ((2, 3, 12), Split(2, (4, 8))),
    "packed rows": ((12, 3), Split(0, (8, 4))),
    "packed sequence of one": ((1, 12, 3), Split(1, (8, 4))),
}


class Written(TorchDispatchMode):
    """Counts the bytes of what operators return in memory of its own."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(result.alias_info for result in func._schema.returns):
            self.num_bytes += sum(x.nbytes for x in (out if isinstance(out, (tuple, list)) else (out,)))
        return out


@pytest.mark.parametrize("case", SPLITS)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_rows_are_the_parts_of_the_ranks_in_order(case: str, degree: int) -> None:
    shape, split = SPLITS[case]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [cut_segments(whole, split.dim, split.segments, degree, rank) for rank in range(degree)]
    rows = cut_rows(whole, split, degree)
    assert torch.equal(rows, torch.cat(parts))
    assert rows.is_contiguous()
    assert torch.equal(join_rows(rows, split, degree), whole)


@pytest.mark.parametrize("case", ["rows", "sequence of one"])
def test_what_lies_as_a_collective_takes_it_is_not_copied(case: str) -> None:
    shape, split = SPLITS[case]
    whole = torch.randn(shape)
    rows = cut_rows(whole, split, 2)
    assert rows.data_ptr() == whole.data_ptr()
    assert join_rows(rows, split, 2).data_ptr() == whole.data_ptr()


def gather_and_scatter(rank: int, world: int) -> list[torch.Tensor]:
    """In each worker, where a warning of torch's is an error: what a rank gathers, and its part of the sum."""
    import torch.distributed as dist

    from ahp.runtime.tensor.collectives import _gathered, _part_of_sum

    assert dist.group.WORLD is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        whole = _gathered(torch.full((2, 1, 3), float(rank)), Split(1, (world,)), dist.group.WORLD)
        return [whole, _part_of_sum(whole, Split(1, (world,)), dist.group.WORLD)]


def test_collectives_give_no_warning_of_what_torch_will_drop(pool: Pool) -> None:
    for rank, (whole, part) in enumerate(pool.run(gather_and_scatter, 2)):
        assert whole[:, :, 0].tolist() == [[0.0, 1.0]] * 2
        assert part.tolist() == [[[2.0 * rank] * 3]] * 2


def test_what_does_not_lie_so_is_copied_once() -> None:
    for case in ("sequence", "packed"):
        shape, split = SPLITS[case]
        whole = torch.randn(shape)
        with Written() as written:
            rows = cut_rows(whole, split, 2)
        assert written.num_bytes == whole.nbytes
        with Written() as written:
            join_rows(rows, split, 2)
        assert written.num_bytes == whole.nbytes
