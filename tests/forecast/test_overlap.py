import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ahp.cluster.model import Cluster
from ahp.engines.registry import get
from ahp.forecast.axes import ALONE
from ahp.forecast.communication import Network
from ahp.forecast.data_parallel import CommUnit, DataParallel, StageParameters
from ahp.forecast.group import Group
from ahp.forecast.overlap import (
    CONTENTION,
    bucket_ends,
    exposed_ahead_s,
    exposed_behind_s,
    in_buckets,
    left_beside_ahead_s,
    shown_s,
)
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism


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


@given(seconds, seconds, st.floats(0, 1))
def test_no_gather_ahead_costs_less_than_the_bound_of_its_unit(collectives, work, overlap):
    work = (work * 6)[: len(collectives)]
    least_s = shown_s(np.array(collectives), max(work), overlap)
    assert exposed_ahead_s(collectives, work, overlap) >= least_s.sum() * (1 - 1e-9)


def test_gathers_ahead_leave_the_rest_of_the_network():
    left_s = left_beside_ahead_s(np.array([9.0, 2.0, 8.0]), np.array([5.0, 5.0, 5.0]), 1.0)
    assert left_s.tolist() == [3.0, 0.0, 5.0]  # nothing comes after the last


def test_units_that_one_collective_takes_do_not_pay_for_its_start():
    network, replicas = Network(Cluster.parse("16x8xH100-SXM-80GB").groups[0]), Group(128, 8, 16)
    layout, unit = Parallelism(data_parallel_replicate_degree=128), CommUnit(10**7)

    def reduce_s(precision, stage=None):
        traits = get("megatron").traits(Job(precision=precision), layout, EngineChoice(name="megatron"))
        return DataParallel(ALONE, replicas, traits, 1, 1.0).reduce_s(unit, network, stage)

    def share_s(elements):
        return network.time_s("all_reduce", 2.0 * elements, replicas) * unit.dense / elements

    # fp16 in one buffer: as much of it as the unit is. fp8 in buckets of a million elements a rank. No more than a stage has.
    assert (
        reduce_s("fp16") == reduce_s("fp16", StageParameters(2 * 10**9, 0, first=True)) == pytest.approx(share_s(10**9))
    )
    assert (
        reduce_s("fp8")
        == reduce_s("fp8", StageParameters(10**9, 0, first=False))
        == pytest.approx(share_s(128 * 10**6))
    )
    assert (
        reduce_s("fp16", StageParameters(10**7, 0, first=True))
        == reduce_s("fp8", StageParameters(10**7, 0, first=True))
        == pytest.approx(share_s(10**7))
    )
    assert share_s(10**7) > 1.1 * reduce_s("fp8") > 1.1 * reduce_s("fp16")


def sent(bucket):
    """Seconds of buckets of five units, and the work that each waits for; what is sent with no unit is left out."""
    elements = [3, 3, 25, 2, 1]
    ends = np.array([bucket_ends(elements, bucket)])
    seconds = in_buckets(np.array([[[1.0, 2.0, 4.0, 8.0, 16.0]], [[5.0, 6.0, 7.0, 8.0, 9.0]]]), ends)
    assert not seconds[:, ~ends].any()
    return list(zip(*seconds[:, ends].tolist(), strict=True))


def test_units_wait_for_others_until_they_fill_a_bucket():
    assert sent(0) == [(1.0, 5.0), (2.0, 6.0), (4.0, 7.0), (8.0, 8.0), (16.0, 9.0)]
    assert sent(3) == [(1.0, 5.0), (2.0, 6.0), (4.0, 7.0), (24.0, 17.0)]
    assert sent(6) == [(3.0, 11.0), (4.0, 7.0), (24.0, 17.0)]
    assert sent(7) == [(3.0, 11.0), (4.0, 7.0), (24.0, 17.0)]
    assert sent(10**9) == [(31.0, 35.0)]
    assert bucket_ends([], 5) == []


@pytest.mark.parametrize(("bucket", "pieces"), [(0, 1), (1, 4), (40, 2), (50, 2), (80, 1), (200, 1)])
def test_a_unit_is_sent_in_whole_weights(bucket, pieces):
    assert CommUnit(115, 0, (30, 20, 5, 60)).pieces(bucket) == pieces


@given(seconds, seconds, st.integers(1, 9))
def test_pieces_are_units_of_their_own(collectives, work, count):
    work = (work * 6)[: len(collectives)]
    cut = (
        [part / count for part in collectives for _ in range(count)],
        [part / count for part in work for _ in range(count)],
    )
    pieces = exposed_behind_s(collectives, work, 1.0, pieces=[count] * len(work))
    assert pieces == pytest.approx(exposed_behind_s(*cut, 1.0), abs=1e-9)
    assert pieces <= exposed_behind_s(collectives, work, 1.0) + 1e-9


@given(seconds, seconds, st.floats(0, 5))
def test_what_a_rank_computes_later_hides_more(collectives, work, later_s):
    work = (work * 6)[: len(collectives)]
    behind = exposed_behind_s(collectives, work, 1.0, later_s=later_s)
    at_once = exposed_behind_s(collectives, work, 1.0)
    assert CONTENTION * sum(collectives) - 1e-9 <= behind <= at_once
    assert behind == pytest.approx(max(at_once - (1.0 - CONTENTION) * later_s, CONTENTION * sum(collectives)), abs=1e-9)
