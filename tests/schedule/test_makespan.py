"""The fast makespan is the simulation's, whether periods are run or added, and so is what is kept in flight."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.errors import BadInput
from ahp.schedule.makespan import SECONDS, _may_queue, _Run, makespan, peak_kept
from ahp.schedule.patterns import illegal, make
from ahp.schedule.registry import SCHEDULES, get
from ahp.schedule.simulate import StageTimes, peak_in_flight, simulate
from ahp.schedule.slots import Period
from ahp.schedule.table import _as_simulated, _table, table
from tests.lower_bounds import lower_bound_s

layouts = st.tuples(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.one_of(st.integers(1, 20), st.integers(20, 90)),
).filter(lambda c: illegal(*c) is None)
seconds = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 10.0))


def random_times(data):
    """Of a stage."""
    beside = {"gathered_s": data.draw(seconds), "reduce_s": data.draw(seconds)}
    return StageTimes(
        *(data.draw(seconds) for _ in range(8)), **beside, reduce_slows=data.draw(st.sampled_from([0.0, 0.3]))
    )


def same(name, p, v, m, times):
    """Asserts that both ways agree on everything they share."""
    fast, timeline = makespan(name, p, v, m, times), simulate(make(name, p, v, m), times)
    nothing_s = 1e-12 * (1.0 + timeline.makespan_s)
    assert fast.makespan_s == pytest.approx(timeline.makespan_s, rel=1e-9, abs=nothing_s)
    assert fast.busy_s == pytest.approx(timeline.busy_s, rel=1e-9, abs=nothing_s)
    assert fast.ends_s == pytest.approx([timeline.end_s(rank) for rank in range(p)], rel=1e-9, abs=nothing_s)
    assert fast.reducing_s == pytest.approx(timeline.reducing_s, rel=1e-9, abs=nothing_s * 1e3)
    assert fast.gathering_s == pytest.approx(timeline.gathering_s, rel=1e-9, abs=nothing_s * 1e3)
    assert fast.slowed_s == pytest.approx(timeline.slowed_s, rel=1e-9, abs=nothing_s * 1e3)
    idle_s = [timeline.makespan_s - busy_s for busy_s in timeline.busy_s]
    assert fast.idle_s == pytest.approx(idle_s, rel=1e-9, abs=1e-9 * (1.0 + timeline.makespan_s))


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(layouts, st.data())
def test_the_fast_makespan_is_the_simulations(layout, data):
    name, p, v, _ = layout
    times = [random_times(data) for _ in range(p * v)]
    same(*layout, times)
    free = [without_queues(one, data) for one in times]
    assert not _may_queue(name, p, v, free)
    same(*layout, free)


def without_queues(times, data):
    """With messages that take no longer than any action, so that the table is run."""
    actions = {name: getattr(times, name) + 1.0 for name in SECONDS}
    sends = {name: data.draw(st.floats(0.0, 1.0)) for name in ("send_forward_s", "send_backward_s")}
    return times._replace(**actions, **sends)


MANY = [
    ("1F1B", 1, 1, 50), ("1F1B", 3, 1, 200), ("1F1B", 8, 1, 100), ("Interleaved1F1B", 2, 3, 96), ("Interleaved1F1B", 4, 2, 100),
    ("Interleaved1F1B", 4, 2, 15), ("InterleavedZeroBubble", 1, 1, 60), ("InterleavedZeroBubble", 4, 1, 150), ("InterleavedZeroBubble", 4, 2, 64),
    ("ZBVZeroBubble", 3, 2, 90), ("DualPipeV", 3, 2, 90), ("GPipe", 4, 1, 200),
]  # fmt: skip


@pytest.mark.parametrize(("name", "p", "v", "m"), MANY)
@pytest.mark.parametrize("send_s", [0.0, 0.02, 3.0])
def test_many_micro_batches_of_a_model(name, p, v, m, send_s):
    # Equal stages with an embedding at one end and a head at the other, as most forecasts are.
    last = p * v - 1
    times = [
        StageTimes(
            1.0 + 0.4 * (s == last),
            2.0 + 0.7 * (s == last),
            1.1,
            0.9,
            send_s,
            send_s,
            0.5,
            0.3,
            gathered_s=2.0 + 3.0 * (s >= p),
            reduce_s=4.0,
            reduce_slows=0.2,
        )
        for s in range(p * v)
    ]
    same(name, p, v, m, times)


@pytest.mark.parametrize("difference", [1e-6, 1e-9, 1e-11, 1e-12, 1e-13, 1e-15])
def test_stages_that_hardly_differ_do_not_pass_for_a_rhythm(difference):
    # The slower stage takes longer than the steady rows to hold up the others.
    times = [StageTimes(1.0 + difference * (s == 2), 2.0, send_forward_s=0.4, send_backward_s=0.4) for s in range(3)]
    same("1F1B", 3, 1, 400, times)


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [("1F1B", 4, 1, 200), ("Interleaved1F1B", 4, 2, 64), ("InterleavedZeroBubble", 4, 1, 120), ("DualPipeV", 3, 2, 90)],
)
def test_periods_are_added_not_run(name, p, v, m):
    few = table(name, p, v, 4 * p)
    run = _Run(few, [StageTimes(1.0, 2.0, 1.0, 1.0, 0.01, 0.01)] * (p * v), None)
    assert run.settles((m - 4 * p) // few.micro_batches_per_period)


@pytest.mark.parametrize("p", [2, 3, 6])
@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_a_longer_table_is_the_short_one_with_its_steady_rows_again(name, p):
    few, many = get(name).period(p, 2, 8 * p).enough, 4 * p + 9
    short, long = table(name, p, 2, few), table(name, p, 2, many)
    assert short.steady[1] - short.steady[0] >= short.rows_per_period
    simulated = _table(_as_simulated(name, p, 2, many), p, 2 * p, many, Period(1, short.rows_per_period))
    for field in ("code", "source", "send", "first", "last", "reads_last"):
        assert np.array_equal(getattr(long, field), getattr(simulated, field))


@settings(max_examples=60, deadline=None)
@given(layouts, st.data())
def test_what_is_kept_is_what_the_order_keeps(layout, data):
    _, p, v, _ = layout
    weights = [data.draw(st.floats(0.0, 10.0)) for _ in range(p * v)]
    freed = [data.draw(st.floats(0.0, weight)) for weight in weights]
    assert peak_kept(*layout, weights) == pytest.approx(peak_in_flight(make(*layout).ranks, weights))
    assert peak_kept(*layout, weights, freed) == pytest.approx(peak_in_flight(make(*layout).ranks, weights, freed))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_fewer_micro_batches_than_ranks_are_a_schedule_too(m):
    times = [StageTimes(1.0 + s, 2.0, send_forward_s=0.1, send_backward_s=0.2) for s in range(4)]
    slow = simulate(make("1F1B", 4, 1, m), times)
    assert makespan("1F1B", 4, 1, m, times).makespan_s == pytest.approx(slow.makespan_s, rel=1e-12)
    assert lower_bound_s("1F1B", 4, 1, m, times) <= slow.makespan_s * (1 + 1e-12)
    assert peak_kept("1F1B", 4, 1, m, [1, 1, 1, 1]) == peak_in_flight(make("1F1B", 4, 1, m).ranks, [1, 1, 1, 1])


def test_the_whole_timeline_is_there_on_demand():
    times = [StageTimes(1.0, 2.0)] * 4
    fast = makespan("1F1B", 4, 1, 8, times)
    assert fast.timeline.makespan_s == pytest.approx(fast.makespan_s)
    assert fast.timeline.end_s(3) == pytest.approx(fast.ends_s[3])
    assert len(fast.timeline.ranks[0]) == 16


@pytest.mark.parametrize(
    "call", [lambda: makespan("1F1B", 4, 2, 8, [StageTimes(1, 2)] * 8), lambda: peak_kept("1F1B", 4, 2, 8, [1] * 8)]
)
def test_a_layout_that_is_none_is_refused(call):
    with pytest.raises(BadInput, match="virtual_stages_per_rank = 2"):
        call()
