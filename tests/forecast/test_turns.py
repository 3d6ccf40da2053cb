"""Workers that share cores: what a schedule takes where those that wait leave the cores to the others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.model import Cluster
from ahp.forecast.mesh import PipelineAxis
from ahp.forecast.step import price
from ahp.forecast.turns import least_share, share, turns
from ahp.plan import EngineChoice, Parallelism
from ahp.schedule.bounds import TimeColumns, lower_bounds_s
from ahp.schedule.patterns import illegal, make
from ahp.schedule.registry import SCHEDULES
from ahp.schedule.simulate import StageTimes, Timeline, simulate
from tests.search.small import cpu_workers, small

PIPELINE = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "1F1B"}


def by_turns_s(timeline: Timeline, seconds: dict[str, list[float]], turns: float) -> float:
    """The same schedule, run moment by moment: of ``p`` ranks, one on each of as many workers, those that have something to do share
    ``p / turns`` cores evenly, a core each at most. Sends take no time."""
    order, p = timeline.schedule.ranks, len(timeline.schedule.ranks)
    at, now = [0] * p, 0.0
    done: set[tuple[str, int, int]] = set()

    def ready(rank: int) -> bool:
        if at[rank] == len(order[rank]):
            return False
        letter, stage, micro_batch = order[rank][at[rank]]
        if letter == "F":
            return stage == 0 or ("F", stage - 1, micro_batch) in done
        if letter == "W":
            return True
        last = stage == timeline.schedule.num_stages - 1
        return last or ("B", stage + 1, micro_batch) in done or ("I", stage + 1, micro_batch) in done

    runs: dict[int, float] = {}
    while any(at[rank] < len(order[rank]) for rank in range(p)):
        for rank in range(p):
            if rank not in runs and ready(rank):
                letter, stage, _ = order[rank][at[rank]]
                runs[rank] = seconds[letter][stage]
        # With all at once each would run at speed 1, which is a core's over ``turns``.
        speed = min(turns, p / len(runs))
        passed = min(runs.values()) / speed
        now += passed
        runs = {rank: rest - passed * speed for rank, rest in runs.items()}
        for rank in [rank for rank, rest in runs.items() if rest <= 1e-12]:
            del runs[rank]
            done.add(order[rank][at[rank]])
            at[rank] += 1
    return now


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(2, 4),
    st.integers(1, 6),
    st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    st.data(),
)
def test_it_is_what_ranks_take_that_share_cores_evenly(
    name: str, p: int, m: int, each: float, data: st.DataObject
) -> None:
    v = {"Interleaved1F1B": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}.get(name, 1)
    if illegal(name, p, v, m):
        return
    whole = st.sampled_from([1.0, 2.0, 3.0, 5.0])
    half = [(data.draw(whole), data.draw(whole)) for _ in range(p * v)]
    times = [StageTimes(data.draw(whole), a + b, a, b) for a, b in half]
    timeline = simulate(make(name, p, v, m), times)
    seconds = {
        "F": [t.forward_s for t in times],
        "B": [t.backward_s for t in times],
        "I": [t.input_gradient_s for t in times],
        "W": [t.weight_gradient_s for t in times],
    }
    part = share(timeline, PipelineAxis(p, 1, p), p, each)
    assert part * timeline.makespan_s == pytest.approx(by_turns_s(timeline, seconds, each), rel=1e-9)
    bound_s = lower_bounds_s(name, p, v, m, TimeColumns.of(times), turns=each)[0]
    assert bound_s <= part * timeline.makespan_s * (1 + 1e-9)
    assert (1 - 1e-12) / each <= part <= 1 + 1e-12


def test_ranks_of_other_pipelines_compute_at_the_same_time() -> None:
    """Two pipelines of two ranks: while the first rank of each computes half of the workers do."""
    timeline = simulate(make("GPipe", 2, 1, 1), [StageTimes(1.0, 1.0)] * 2)
    assert share(timeline, PipelineAxis(2, 1, 4), 4, 4.0) == share(timeline, PipelineAxis(2, 2, 4), 4, 4.0) == 0.5


def test_a_node_with_one_place_of_the_pipeline_has_nobody_who_waits() -> None:
    timeline = simulate(make("GPipe", 2, 1, 1), [StageTimes(1.0, 1.0)] * 2)
    assert share(timeline, PipelineAxis(2, 2, 4), 2, 2.0) == 1.0


def test_turns_are_those_of_the_workers_that_were_timed() -> None:
    (nodes,) = cpu_workers(4, 2).groups
    assert turns(nodes) == 2.0
    assert turns(cpu_workers(2, 2).groups[0]) == 1.0
    assert turns(cpu_workers(2, 4).groups[0]) == 1.0
    assert turns(nodes.model_copy(update={"measured": None})) == 1.0
    assert turns(Cluster.parse("8xA100-SXM-80GB").groups[0]) == 1.0
    assert least_share(2.0, 1) == 1.0
    assert least_share(2.0, 3) == 0.5


def test_a_pipeline_is_faster_where_those_that_wait_share_cores() -> None:
    """The parts are still those of the step, and a layout without a pipeline is as it was."""

    def of(cores: int, layout: dict[str, object]) -> tuple[float, float, float]:
        asked = small(cluster=cpu_workers(4, cores))
        priced = price(asked.graph, asked.cluster, asked.job, Parallelism.model_validate(layout), EngineChoice())
        forecast = priced.forecast
        assert sum(forecast.step.values()) == pytest.approx(forecast.step_time_s, rel=1e-9)
        assert priced.timeline.makespan_s == pytest.approx(priced.span.makespan_s, rel=1e-9)
        return forecast.step_time_s, forecast.step.get("bubble", 0.0), priced.span.makespan_s

    all_at_once, shared = of(4, PIPELINE), of(2, PIPELINE)
    assert 0.5 < shared[2] / all_at_once[2] < 0.9
    assert shared[1] / shared[2] == pytest.approx(all_at_once[1] / all_at_once[2], rel=1e-9)
    data = {"data_parallel_replicate_degree": 4}
    assert of(4, data) == of(2, data)
