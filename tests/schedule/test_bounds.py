"""No bound is above the simulation, and where a schedule has a closed form the bound is it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.schedule.actions import Kind
from ahp.schedule.bounds import TimeColumns, _Paths, gpipe_ends_s, in_flight, lower_bounds_s
from ahp.schedule.patterns import illegal, make
from ahp.schedule.registry import SCHEDULES, get
from ahp.schedule.simulate import StageTimes, peak_in_flight, simulate
from tests.lower_bounds import lower_bound_s

layouts = st.tuples(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 3), st.integers(1, 18)).filter(
    lambda c: illegal(*c) is None
)
# Short and equal times make ties and empty stages; long ones make a single rank or send decide.
seconds = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 10.0))


def random_times(data):
    """Of a stage."""
    beside = {"gathered_s": data.draw(seconds), "reduce_s": data.draw(seconds)}
    return StageTimes(
        *(data.draw(seconds) for _ in range(8)), **beside, reduce_slows=data.draw(st.sampled_from([0.0, 0.3]))
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(layouts, st.data())
def test_no_bound_is_above_the_simulation(layout, data):
    name, p, v, m = layout
    times = [random_times(data) for _ in range(p * v)]
    if name == "GPipe":  # which gathers no weights ahead
        times = [t._replace(gathered_s=0.0) for t in times]
    makespan_s = simulate(make(name, p, v, m), times).makespan_s
    bound_s = lower_bound_s(name, p, v, m, times)
    assert bound_s <= makespan_s * (1 + 1e-12)
    if name == "GPipe":
        assert bound_s == pytest.approx(makespan_s)


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_gpipe_ends_exactly(p, m, data):
    times = [random_times(data)._replace(gathered_s=0.0) for _ in range(p)]
    timeline = simulate(make("GPipe", p, 1, m), times)
    assert gpipe_ends_s(m, times) == pytest.approx([ends[-1] for ends in timeline.ends_s])


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [("GPipe", p, 1, m) for p, m in ((1, 1), (1, 4), (4, 2), (4, 9))]
    + [("1F1B", p, 1, m) for p, m in ((1, 1), (1, 4), (2, 2), (4, 9), (8, 8))]
    + [("Interleaved1F1B", p, v, m) for p, v, m in ((2, 2, 2), (2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16))],
)
@pytest.mark.parametrize("backward_s", [0.5, 1.0, 2.0])
def test_the_bound_is_exact_for_equal_stages(name, p, v, m, backward_s):
    times = [StageTimes(1.0, backward_s)] * (p * v)
    assert lower_bound_s(name, p, v, m, times) == pytest.approx(simulate(make(name, p, v, m), times).makespan_s)


@pytest.mark.parametrize(
    ("name", "v"), [("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2)]
)
@pytest.mark.parametrize("p", [2, 4])
def test_the_bound_is_exact_for_equal_parts_of_a_split_backward(name, v, p):
    times = [StageTimes(1.0, 9.0, 1.0, 1.0)] * (p * v)
    assert lower_bound_s(name, p, v, 3 * p, times) == pytest.approx(simulate(make(name, p, v, 3 * p), times).makespan_s)


@pytest.mark.parametrize(
    ("v", "m", "least"), [(1, 4, 0.97), (1, 8, 0.999), (1, 16, 0.999), (1, 40, 0.999), (2, 4, 0.93), (2, 16, 0.95)]
)
def test_a_split_backward_is_known_at_few_micro_batches(v, m, least):
    times = [StageTimes(f, 2 * f, f, f) for f in (1.0 + 0.1 * (3 * stage % 8) for stage in range(8 * v))]
    bound_s = lower_bound_s("InterleavedZeroBubble", 8, v, m, times)
    makespan_s = simulate(make("InterleavedZeroBubble", 8, v, m), times).makespan_s
    assert least * makespan_s <= bound_s <= makespan_s * (1 + 1e-12)


@pytest.mark.parametrize("m", [4, 7, 16])
def test_round_trips_bind_where_sends_are_long(m):
    times = [StageTimes(1.0, 2.0, send_forward_s=5.0, send_backward_s=5.0)] * 4
    bound_s = lower_bound_s("1F1B", 4, 1, m, times)
    assert 3.0 * (m + 3) < 0.8 * bound_s
    assert bound_s == pytest.approx(simulate(make("1F1B", 4, 1, m), times).makespan_s, rel=0.12)


@pytest.mark.parametrize("m", [8, 32])
@pytest.mark.parametrize(("name", "v"), [("InterleavedZeroBubble", 2), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3)])
def test_links_bind_where_messages_take_longer_than_passes(name, v, m):
    times = [StageTimes(1.0, 2.0, 1.0, 1.0, send_forward_s=12.0, send_backward_s=12.0)] * (2 * v)
    bound_s, makespan_s = lower_bound_s(name, 2, v, m, times), simulate(make(name, 2, v, m), times).makespan_s
    assert 0.75 * makespan_s <= bound_s <= makespan_s * (1 + 1e-12)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", [s.name for s in SCHEDULES.values() if s.splits_backward])
def test_split_backwards_are_counted_as_they_are_ordered(name, p):
    v, m = (1 if name.startswith("Interleaved") else 2), 2 * p
    paths = _Paths(name, p, v, m, TimeColumns.of([StageTimes(1.0, 1.0, 1.0, 1.0)] * (p * v)))
    ordered = [a for rank in make(name, p, v, m).ranks for a in rank if a.kind is Kind.INPUT_GRADIENT]
    assert paths.split.tolist() == [sum(a.stage == stage for a in ordered) for stage in range(p * v)]


@pytest.mark.slow
@given(layouts, st.data())
def test_many_layouts_at_once_are_bounded_as_one_by_one(layout, data):
    name, p, v, m = layout
    rows = [[random_times(data) for _ in range(p * v)] for _ in range(3)]
    alone = [TimeColumns.of(times) for times in rows]
    together = TimeColumns(*(np.concatenate([getattr(one, f) for one in alone]) for f in TimeColumns.__annotations__))
    assert lower_bounds_s(name, p, v, m, together).tolist() == [lower_bound_s(name, p, v, m, times) for times in rows]


def least_kept(name, p, v, m, kept):
    """[p] What each rank keeps at once at least, from what a micro-batch of each stage keeps, [S]."""
    return (in_flight(name, p, v, m) * np.array(kept)[get(name).placement.rank_stages(p, v)]).sum(axis=-1)


@settings(max_examples=200)
@given(layouts, st.data())
def test_what_is_kept_is_under_the_simulation(layout, data):
    name, p, v, m = layout
    kept = [data.draw(st.integers(0, 9)) for _ in range(p * v)]
    least = least_kept(name, p, v, m, kept)
    peaks = peak_in_flight(make(name, p, v, m).ranks, kept)
    assert all(np.less_equal(least, peaks))
    if name in ("GPipe", "1F1B"):
        assert least.tolist() == list(peaks)


@pytest.mark.parametrize(
    ("name", "v"), [("Interleaved1F1B", 3), ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2)]
)
@pytest.mark.parametrize("p", [2, 4])
def test_what_is_kept_is_exact_for_equal_stages(name, v, p):
    peaks = peak_in_flight(make(name, p, v, 3 * p).ranks, [1.0] * (p * v))
    assert least_kept(name, p, v, 3 * p, np.ones(p * v)).tolist() == list(peaks)
