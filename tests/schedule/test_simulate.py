"""The simulation keeps every dependency, meets the closed forms, and its bound holds."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.schedule.actions import Action, Kind, Schedule
from ahp.schedule.patterns import illegal, make
from ahp.schedule.registry import SCHEDULES
from ahp.schedule.simulate import Run, StageTimes, links, peak_in_flight, simulate


def even(stages, forward=1.0, backward=2.0, send=0.0):
    return [StageTimes(forward, backward, send_forward_s=send, send_backward_s=send)] * stages


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 9)])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_even_stages_meet_the_closed_form(name, p, m):
    timeline = simulate(make(name, p, 1, m), even(p))
    assert timeline.makespan_s == pytest.approx((m + p - 1) * 3.0)
    assert timeline.busy_s == pytest.approx([timeline.makespan_s - (p - 1) * 3.0] * p)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16)])
def test_interleaving_divides_the_bubble(p, v, m):
    timeline = simulate(make("Interleaved1F1B", p, v, m), even(p * v))
    assert timeline.makespan_s == pytest.approx(m * v * 3.0 + (p - 1) * 3.0)


layouts = st.tuples(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)).filter(
    lambda c: illegal(*c) is None
)
seconds = st.floats(0.0, 10.0, allow_nan=False)


@settings(max_examples=80, deadline=None)
@given(layouts, st.data())
def test_every_wait_is_kept(layout, data):
    schedule = make(*layout)
    times = [StageTimes(*(data.draw(seconds) for _ in range(8))) for _ in range(schedule.num_stages)]
    timeline = simulate(schedule, times)
    spans = {
        (span.action.kind, span.action.stage, span.action.micro_batch): span for rank in timeline.ranks for span in rank
    }
    extra_of = {}
    for rank in timeline.ranks:
        extra_of |= {s.action.stage: s.action for s in rank if s.action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)}
    for (kind, stage, i), span in spans.items():
        if kind is Kind.FORWARD and stage > 0:
            assert span.start_s >= spans[kind, stage - 1, i].end_s + times[stage - 1].send_forward_s
        if kind is Kind.WEIGHT_GRADIENT:
            assert span.start_s >= spans[Kind.INPUT_GRADIENT, stage, i].end_s
        if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            assert span.start_s >= spans[Kind.FORWARD, stage, i].end_s
            if stage < schedule.num_stages - 1:
                either = (Kind.BACKWARD, stage + 1, i), (Kind.INPUT_GRADIENT, stage + 1, i)
                sender = next(spans[key] for key in either if key in spans)
                last = extra_of[stage + 1] == sender.action
                sent = sender.end_s - (times[stage + 1].last_backward_extra_s if last else 0.0)
                assert span.start_s >= (sent + times[stage + 1].send_backward_s) * (1 - 1e-12)
    for rank in timeline.ranks:
        assert all(a.end_s <= b.start_s for a, b in pairwise(rank))
    for stage, action in extra_of.items():
        span = spans[action.kind, stage, action.micro_batch]
        whole = action.kind is Kind.BACKWARD
        expected = times[stage].backward_s if whole else times[stage].weight_gradient_s
        expected += times[stage].last_backward_extra_s
        assert span.end_s - span.start_s == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 4), (4, 9)])
def test_in_flight_micro_batches(p, m):
    assert peak_in_flight(make("GPipe", p, 1, m).ranks, [1] * p) == (m,) * p
    assert peak_in_flight(make("1F1B", p, 1, m).ranks, [1] * p) == tuple(min(m, p - i) for i in range(p))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_in_flight_interleaved(p, v, m):
    expected = tuple(min(m * v, 2 * (p - i - 1) + (v - 1) * p + 1) for i in range(p))
    assert peak_in_flight(make("Interleaved1F1B", p, v, m).ranks, [1] * (p * v)) == expected


def test_extras_hold_up_the_rank_and_the_first_micro_batch():
    times = [StageTimes(1.0, 2.0, first_forward_extra_s=10.0, last_backward_extra_s=100.0)] * 2
    timeline = simulate(make("1F1B", 2, 1, 2), times)
    # Stage 1: F0 from 11 to 22, B0, F1, B1 to 27, then the extra; stage 0 gets the gradient at 27.
    assert timeline.end_s(1) == pytest.approx(127.0)
    assert timeline.end_s(0) == pytest.approx(129.0)


def test_gradients_are_reduced_one_stage_after_the_other_beside_the_computation():
    """One rank with two stages: those of stage 1 are reduced from 7 to 12, those of stage 0 when both are done, from 12 to 13."""
    kinds = (Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.BACKWARD, 0)
    schedule = Schedule("own", 2, 1, (tuple(Action(kind, stage, 0) for kind, stage in kinds),), (0, 0))
    times = [StageTimes(1.0, 2.0, reduce_s=1.0), StageTimes(1.0, 4.0, last_backward_extra_s=1.0, reduce_s=5.0)]
    timeline = simulate(schedule, times)
    assert timeline.ends_s == ((1.0, 2.0, 7.0, 9.0),)
    assert timeline.reducing_s == (4.0,)
    assert timeline.makespan_s == timeline.end_s(0) == 13.0
    assert timeline.busy_s == (9.0,)
    slowed = simulate(schedule, [one._replace(reduce_slows=0.25) for one in times])
    # The backward of stage 0 takes 2.5 s in place of 2, all beside the reduction, which takes no longer.
    assert slowed.ends_s == ((1.0, 2.0, 7.0, 9.5),)
    assert slowed.slowed_s == (0.5,)
    assert slowed.busy_s == (9.5,)
    assert slowed.makespan_s == 13.0


def test_a_link_takes_one_message_after_the_other():
    times = [StageTimes(1.0, 1.0, send_forward_s=3.0, send_backward_s=2.0)] * 2
    timeline = simulate(make("GPipe", 2, 1, 2), times)
    # Outputs leave at 1 s and, though it is there at 2 s, at 4 s; gradients at 9 s and at 11 s.
    assert timeline.ends_s == ((1.0, 2.0, 12.0, 14.0), (5.0, 8.0, 9.0, 10.0))


def test_outputs_and_gradients_of_a_v_share_the_links_between_ranks():
    assert links((0, 1, 1, 0)) == ([0, 1, 2, 0], [0, 2, 1, 0])
    assert links((0, 1, 0, 1)) == ([0, 1, 0, 0], [0, 1, 0, 1])
    assert links((0,)) == ([0], [0])


def test_split_backward_frees_at_the_weight_gradient():
    f, i, w = Action(Kind.FORWARD, 0, 0), Action(Kind.INPUT_GRADIENT, 0, 0), Action(Kind.WEIGHT_GRADIENT, 0, 0)
    schedule = Schedule("split", 1, 1, ((f, i, w),), (0,))
    times = [StageTimes(1.0, 99.0, 2.0, 3.0)]
    assert simulate(schedule, times).makespan_s == 6.0
    assert peak_in_flight(schedule.ranks, [5.0]) == (5.0,)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 6), (4, 12), (8, 16)])
def test_zero_bubble_meets_the_papers_closed_forms(p, m):
    # arXiv 2401.10241, table 1 (ZB-H1): bubble (p - 1)(F + I - W), activations of p micro-batches as in 1F1B.
    times = [StageTimes(1.5, 9.0, 1.25, 1.0)] * p
    schedule = make("InterleavedZeroBubble", p, 1, m)
    assert simulate(schedule, times).makespan_s == pytest.approx(m * 3.75 + (p - 1) * 1.75)
    assert peak_in_flight(schedule.ranks, [1.0] * p) == (min(p, m),) * p


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 9), (8, 16)])
def test_zbv_has_no_bubble_but_the_fill_at_equal_times(p, m):
    times = [StageTimes(1.0, 9.0, 1.0, 1.0)] * (2 * p)
    schedule = make("ZBVZeroBubble", p, 2, m)
    assert simulate(schedule, times).makespan_s == pytest.approx(6 * m + p - 1)
    assert peak_in_flight(schedule.ranks, [1.0] * (2 * p)) == (2 * p,) * p


def test_what_the_input_gradient_frees_is_held_no_longer():
    f, i, w = (
        [Action(kind, 0, n) for n in range(2)] for kind in (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    )
    schedule = Schedule("split", 1, 2, ((f[0], i[0], f[1], i[1], w[0], w[1]),), (0,))
    assert peak_in_flight(schedule.ranks, [5.0]) == (10.0,)
    assert peak_in_flight(schedule.ranks, [5.0], [2.0]) == (8.0,)
    assert peak_in_flight(schedule.ranks, [5.0], [5.0]) == (5.0,)


def test_an_order_that_cannot_run_is_named():
    f, b = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    with pytest.raises(ValueError, match="never ends: waiting at 0B0"):
        simulate(Schedule("wrong", 1, 1, ((b, f),), (0,)), even(1))


class Counted(list[Any]):
    """A list that counts what is read of it."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))


def test_an_action_is_read_once_and_once_more_for_each_time_that_its_rank_waits() -> None:
    """Two ranks that wait for each other at every action went through all actions before each time: minutes for tens of thousands."""
    order = make("1F1B", 2, 1, 300)
    counted = [Counted(actions) for actions in order.ranks]
    Run(counted, order.stage_rank, 300, [StageTimes(1.0, 2.0) for _ in range(2)])
    actions = sum(map(len, counted))
    assert actions <= sum(of.reads for of in counted) <= 2 * actions
