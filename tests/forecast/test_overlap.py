import pytest
from hypothesis import given
from hypothesis import strategies as st

from ahp.forecast.overlap import CONTENTION, exposed_ahead_s, exposed_behind_s


def test_the_first_gather_and_the_last_reduction_always_show():
    assert exposed_ahead_s([1.0, 1.0, 1.0], [5.0, 5.0, 5.0], 1.0) == pytest.approx(1.0 + 2 * CONTENTION)
    assert exposed_behind_s([1.0, 1.0, 1.0], [5.0, 5.0, 5.0], 1.0) == pytest.approx(1.0 + 2 * CONTENTION)


def test_what_is_longer_than_the_work_shows():
    assert exposed_ahead_s([4.0, 4.0], [1.0, 1.0], 1.0) == pytest.approx(4.0 + 3.0 + CONTENTION)
    # The first waits for its work (1), then both are sent one after the other (8); 2 of that was beside work.
    assert exposed_behind_s([4.0, 4.0], [1.0, 1.0], 1.0) == pytest.approx(7.0 + CONTENTION)


def test_nothing_hides_without_overlap():
    assert exposed_ahead_s([1.0, 2.0], [9.0, 9.0], 0.0) == 3.0
    assert exposed_behind_s([1.0, 2.0], [9.0, 9.0], 0.0) == 3.0


def test_no_units_cost_nothing():
    assert exposed_ahead_s([], [], 1.0) == exposed_behind_s([], [], 1.0) == 0.0


seconds = st.lists(st.floats(0, 10), min_size=1, max_size=6)


@given(seconds, seconds, st.floats(0, 1))
def test_exposed_is_between_nothing_and_everything(collectives, work, overlap):
    work = (work * 6)[: len(collectives)]
    for exposed in (exposed_ahead_s(collectives, work, overlap), exposed_behind_s(collectives, work, overlap)):
        # A short collective at the end of long work is the difference of two clocks.
        assert 0 <= exposed <= sum(collectives) * (1 + 1e-9) + sum(work) * 1e-14
