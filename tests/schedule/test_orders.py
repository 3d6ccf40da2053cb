"""Orders that a layout brings: changed from whole backwards to parts and back, and one for each replica."""

from __future__ import annotations

import pytest

from ahp.plan import Parallelism
from ahp.schedule.legal import why_not
from ahp.schedule.orders import apart, given_order, illegal_order, order_text, read_order, under_pattern, whole
from ahp.schedule.patterns import make

PATTERNS = [("1F1B", 1), ("GPipe", 1), ("InterleavedZeroBubble", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)]


@pytest.mark.parametrize(("name", "v"), PATTERNS)
def test_backwards_are_taken_apart_and_put_together(name: str, v: int) -> None:
    schedule = make(name, 3, v, 6)
    both, none = apart(schedule), whole(schedule)
    assert why_not(both) is None
    assert why_not(none) is None
    assert not any(action.kind == "B" for rank in both.ranks for action in rank)
    assert {action.kind for rank in none.ranks for action in rank} == {"F", "B"}
    assert whole(both) == none


@pytest.mark.parametrize(("name", "v"), PATTERNS)
def test_the_pattern_most_like_an_order_is_the_one_that_it_is(name: str, v: int) -> None:
    given = Parallelism(
        pipeline_parallel_degree=3,
        virtual_stages_per_rank=v,
        pipeline_parallel_schedule="Synthesized",
        pipeline_parallel_order=order_text(make(name, 3, v, 6)),
    )
    like = under_pattern(given)
    assert like.pipeline_parallel_schedule == ("1F1B" if name == "GPipe" else name)
    assert like.pipeline_parallel_order is None
    assert under_pattern(like) is like


def layout(*orders: tuple[str, ...], replicas: int = 2, v: int = 2) -> Parallelism:
    return Parallelism(
        data_parallel_replicate_degree=replicas,
        pipeline_parallel_degree=2,
        virtual_stages_per_rank=v,
        pipeline_parallel_schedule="Synthesized",
        pipeline_parallel_order=tuple(line for order in orders for line in order),
    )


SECOND = "1F0,2F0,2I0,2W0,1I0,1W0"
HIGHER_FIRST = ("0F0,3F0,3I0,3W0,0I0,0W0", SECOND)
LOWER_FIRST = ("0F0,3F0,3I0,0I0,0W0,3W0", SECOND)


def test_each_replica_has_its_own_lines() -> None:
    four, two = (order_text(make("1F1B", 2, 1, m)) for m in (4, 2))
    own = layout(four, two, v=1)
    assert [given_order(own, r) for r in (0, 1)] == [read_order("Synthesized", one) for one in (four, two)]
    assert illegal_order(own, (4, 2)) is None
    assert "made for 2 micro-batches, there are 4 (valid: an order of 4)" in str(illegal_order(own, (4, 4)))
    same = layout(four, v=1)
    assert given_order(same, 1) is given_order(same, 0)
    assert "made for 4 micro-batches, there are 2" in str(illegal_order(same, (4, 2)))


def test_replicas_that_would_wait_for_each_other_in_a_circle_are_refused() -> None:
    for order in (HIGHER_FIRST, LOWER_FIRST):
        assert illegal_order(layout(order), (1, 1)) is None
        assert illegal_order(layout(order, order), (1, 1)) is None
    reason = illegal_order(layout(HIGHER_FIRST, LOWER_FIRST), (1, 1))
    assert reason is not None
    assert "the same order of last gradients on each rank" in reason


def test_stages_lie_on_the_same_ranks_on_every_replica() -> None:
    looped = ("0F0,2F0,2B0,0B0", "1F0,3F0,3B0,1B0")
    assert "[0, 1, 1, 0] and [0, 1, 0, 1]" in str(illegal_order(layout(HIGHER_FIRST, looped), (1, 1)))


def test_another_number_of_lines_is_refused() -> None:
    with pytest.raises(
        ValueError, match="3 lines, pipeline_parallel_degree is 2; it needs one a rank, or one a rank of each of 2"
    ):
        layout((*HIGHER_FIRST, SECOND))
