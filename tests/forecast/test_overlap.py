import pytest
from hypothesis import given
from hypothesis import strategies as st

from ahp.cluster.model import Cluster
from ahp.engines.megatron import ONE_BUFFER_ELEMENTS
from ahp.engines.registry import get
from ahp.forecast.communication import Group, Network
from ahp.forecast.overlap import CONTENTION, exposed_ahead_s, exposed_behind_s
from ahp.forecast.stage import DataParallel, Weights
from ahp.forecast.units import ALONE
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


def test_units_that_one_collective_takes_do_not_pay_for_its_start():
    network, replicas = Network(Cluster.parse("16x8xH100-SXM-80GB").groups[0]), Group(128, 8, 16)
    layout = Parallelism(data_parallel_replicate_degree=128)

    def reduce_s(precision, elements):
        traits = get("megatron").traits(Job(precision=precision), layout, EngineChoice(name="megatron"))
        return DataParallel(ALONE, replicas, traits, 1, 1.0).reduce_s(Weights(elements), network)

    # fp16 in one buffer: as much of it as the unit is. fp8 of the same 16 bits, unit by unit: each starts by itself.
    whole = network.time_s("all_reduce", 2.0 * ONE_BUFFER_ELEMENTS, replicas)
    assert reduce_s("fp16", 10**7) == pytest.approx(whole * 10**7 / ONE_BUFFER_ELEMENTS)
    assert reduce_s("fp8", 10**7) == network.time_s("all_reduce", 2.0 * 10**7, replicas)
    assert reduce_s("fp8", 10**7) > 1.5 * reduce_s("fp16", 10**7)
