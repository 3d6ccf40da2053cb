"""The simulation keeps every dependency, meets the closed forms, and its bound holds."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.schedule.actions import Action, Kind, Schedule
from ahp.schedule.patterns import illegal, make
from ahp.schedule.simulate import StageTimes, lower_bound_s, peak_in_flight, simulate


def even(stages, forward=1.0, backward=2.0, send=0.0):
    return [StageTimes(forward, backward, send_forward_s=send, send_backward_s=send)] * stages


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 9)])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_even_stages_meet_the_closed_form(name, p, m):
    timeline = simulate(make(name, p, 1, m), even(p))
    assert timeline.makespan_s == pytest.approx((m + p - 1) * 3.0)
    assert timeline.idle_s == pytest.approx([(p - 1) * 3.0] * p)
    assert lower_bound_s(make(name, p, 1, m), even(p)) == pytest.approx(timeline.makespan_s)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16)])
def test_interleaving_divides_the_bubble(p, v, m):
    timeline = simulate(make("Interleaved1F1B", p, v, m), even(p * v))
    assert timeline.makespan_s == pytest.approx(m * v * 3.0 + (p - 1) * 3.0)


layouts = st.tuples(
    st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)
).filter(lambda c: illegal(*c) is None)
seconds = st.floats(0.0, 10.0, allow_nan=False)


@settings(max_examples=80, deadline=None)
@given(layouts, st.data())
def test_every_wait_is_kept_and_the_bound_holds(layout, data):
    schedule = make(*layout)
    times = [StageTimes(*(data.draw(seconds) for _ in range(8))) for _ in range(schedule.num_stages)]
    timeline = simulate(schedule, times)
    end = {span.action: span for rank in timeline.ranks for span in rank}
    last = schedule.num_stages - 1
    for action, span in end.items():
        stage, i = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD and stage > 0:
            assert span.start_s >= end[Action(Kind.FORWARD, stage - 1, i)].end_s + times[stage - 1].send_forward_s
        if action.kind is Kind.BACKWARD:
            assert span.start_s >= end[Action(Kind.FORWARD, stage, i)].end_s
            if stage < last:
                sender = end[Action(Kind.BACKWARD, stage + 1, i)]
                extra = times[stage + 1].last_backward_extra_s if i == schedule.num_micro_batches - 1 else 0.0
                sent = sender.end_s - extra
                assert span.start_s >= (sent + times[stage + 1].send_backward_s) * (1 - 1e-12)
    for rank in timeline.ranks:
        assert all(a.end_s <= b.start_s for a, b in pairwise(rank))
    assert lower_bound_s(schedule, times) <= timeline.makespan_s * (1 + 1e-12)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 4), (4, 9)])
def test_in_flight_micro_batches(p, m):
    assert peak_in_flight(make("GPipe", p, 1, m), [1] * p) == (m,) * p
    assert peak_in_flight(make("1F1B", p, 1, m), [1] * p) == tuple(min(m, p - i) for i in range(p))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_in_flight_interleaved(p, v, m):
    expected = tuple(min(m * v, 2 * (p - i - 1) + (v - 1) * p + 1) for i in range(p))
    assert peak_in_flight(make("Interleaved1F1B", p, v, m), [1] * (p * v)) == expected


def test_extras_hold_up_the_rank_and_the_first_micro_batch():
    times = [StageTimes(1.0, 2.0, first_forward_extra_s=10.0, last_backward_extra_s=100.0)] * 2
    timeline = simulate(make("1F1B", 2, 1, 2), times)
    # Stage 1: F0 from 11 to 22, B0, F1, B1 to 27, then the extra; stage 0 gets the gradient at 27.
    assert timeline.end_s(1) == pytest.approx(127.0)
    assert timeline.end_s(0) == pytest.approx(129.0)


def test_split_backward_frees_at_the_weight_gradient():
    f, i, w = Action(Kind.FORWARD, 0, 0), Action(Kind.INPUT_GRADIENT, 0, 0), Action(Kind.WEIGHT_GRADIENT, 0, 0)
    schedule = Schedule("split", 1, 1, ((f, i, w),), (0,))
    times = [StageTimes(1.0, 99.0, 2.0, 3.0)]
    assert simulate(schedule, times).makespan_s == lower_bound_s(schedule, times) == 6.0
    assert peak_in_flight(schedule, [5.0]) == (5.0,)


def test_an_order_that_cannot_run_is_named():
    f, b = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    with pytest.raises(ValueError, match="never ends: waiting at 0B0"):
        simulate(Schedule("wrong", 1, 1, ((b, f),), (0,)), even(1))
