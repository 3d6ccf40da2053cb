"""Every schedule answers for itself, and no answer contradicts its order; a new one needs its name and its order alone."""

import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ahp.plan import Parallelism, ScheduleName
from ahp.schedule.actions import Action, Kind
from ahp.schedule.bounds import in_flight
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.makespan import makespan, peak_kept
from ahp.schedule.orders import SYNTHESIZED
from ahp.schedule.patterns import illegal, make
from ahp.schedule.registry import PLAIN, SCHEDULES, get, of_ranks
from ahp.schedule.simulate import StageTimes, peak_in_flight, simulate
from tests.lower_bounds import lower_bound_s

SOURCE = Path(__file__).parents[2] / "src" / "ahp"


class Eager(PipelineSchedule):
    """1F1B with twice the warm-up, so that sends hide: a schedule that says its name and its order, and nothing else."""

    name = "Eager1F1B"
    in_torch = False

    def rank_actions(self, rank, p, v, m):
        warmup = min(m, 2 * (p - 1 - rank))
        actions = [Action(Kind.FORWARD, rank, i) for i in range(warmup)]
        for i in range(m - warmup):
            actions += [Action(Kind.FORWARD, rank, warmup + i), Action(Kind.BACKWARD, rank, i)]
        return actions + [Action(Kind.BACKWARD, rank, i) for i in range(m - warmup, m)]


class Halves(PipelineSchedule):
    """Weight gradients of all micro-batches at the end, two stages per rank: the answers of a split backward by default."""

    name = "Halves"
    in_torch = False
    fewest_virtual = 2
    most_virtual = None
    splits_backward = True

    def rank_actions(self, rank, p, v, m):
        stages = range(rank, p * v, p)
        actions = [Action(Kind.FORWARD, stage, i) for stage in stages for i in range(m)]
        for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT):
            actions += [Action(kind, stage, i) for stage in reversed(stages) for i in range(m)]
        return actions


EVERY = {**SCHEDULES, Eager.name: Eager(), Halves.name: Halves()}


@pytest.fixture(autouse=True)
def toys():
    """The registry has the two above while a test runs."""
    SCHEDULES.update(EVERY)
    yield
    del SCHEDULES[Eager.name], SCHEDULES[Halves.name]


def layouts(most_p=5, most_m=14):
    return st.tuples(
        st.sampled_from(list(EVERY)), st.integers(1, most_p), st.integers(1, 3), st.integers(1, most_m)
    ).filter(lambda c: EVERY[c[0]].illegal(*c[1:]) is None)


seconds = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 10.0))


def random_times(data):
    """Of a stage."""
    beside = {"gathered_s": data.draw(seconds), "reduce_s": data.draw(seconds)}
    return StageTimes(
        *(data.draw(seconds) for _ in range(8)), **beside, reduce_slows=data.draw(st.sampled_from([0.0, 0.3]))
    )


def orders(name, p, v, m):
    return [[(a.kind, a.stage, a.micro_batch) for a in rank] for rank in make(name, p, v, m).ranks]


def test_the_plan_has_the_names_of_the_registry():
    names = [name for name in SCHEDULES if name not in (Eager.name, Halves.name)]
    assert list(get_args(ScheduleName)) == [*names, SYNTHESIZED]
    assert Parallelism().pipeline_parallel_schedule == PLAIN
    assert all(schedule.name == name for name, schedule in SCHEDULES.items())


@pytest.mark.slow
@settings(deadline=None)
@given(layouts(), st.data())
def test_the_bound_and_the_makespan_are_those_of_the_order(layout, data):
    _, p, v, _ = layout
    times = [random_times(data) for _ in range(p * v)]
    slow, fast = simulate(make(*layout), times), makespan(*layout, times)
    nothing_s = 1e-12 * (1.0 + slow.makespan_s)
    assert fast.makespan_s == pytest.approx(slow.makespan_s, rel=1e-9, abs=nothing_s)
    assert lower_bound_s(*layout, times) <= slow.makespan_s + nothing_s


@settings(deadline=None)
@given(layouts(), st.data())
def test_what_is_in_flight_is_a_moment_of_the_order(layout, data):
    name, p, v, m = layout
    weights = [data.draw(st.integers(0, 9)) for _ in range(p * v)]
    counts = in_flight(*layout)
    own = get(name).placement.rank_stages(p, v)
    peaks = peak_in_flight(make(*layout).ranks, weights)
    assert peak_kept(*layout, weights) == pytest.approx(peaks)
    assert all((counts * np.array(weights)[own]).sum(axis=1) <= peaks)
    if v == 1 and p > 1:  # what a mixed cluster's memory is bounded by, whatever the schedule
        assert all(counts[:, 0] >= np.minimum(m if get(name).all_forwards_first else p - np.arange(p), m))


@settings(deadline=None)
@given(layouts())
def test_forwards_before_the_first_gradient_are_those_of_the_order(layout):
    _, p, v, m = layout
    schedule = get(layout[0])
    counts, own = schedule.forwards_before_gradient(p, v, m), schedule.placement.rank_stages(p, v)
    if counts is None or p == 1:
        return
    for rank, actions in enumerate(orders(*layout)):
        gradients = [at for at, (kind, *_) in enumerate(actions) if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)]
        before = [stage for kind, stage, _ in actions[: gradients[0]] if kind is Kind.FORWARD]
        assert [before.count(stage) for stage in own[rank]] == counts[rank].tolist()
        assert actions[gradients[0]][1] == own[rank, -1]
        assert actions[gradients[-1]][1] == own[rank, 0]


@settings(deadline=None)
@given(layouts())
def test_what_is_said_of_the_order_is_true_of_it(layout):
    name, p, v, m = layout
    schedule, ranks = get(name), orders(*layout)
    split = [stage for rank in ranks for kind, stage, _ in rank if kind is Kind.INPUT_GRADIENT]
    assert [split.count(stage) for stage in range(p * v)] == [schedule.num_split(s, p, m) for s in range(p * v)]
    assert schedule.splits_backward or not split
    own = schedule.placement.rank_stages(p, v)
    assert own[:, 0].tolist() == list(range(p))
    for rank, actions in enumerate(ranks):
        assert {stage for _, stage, _ in actions} == set(own[rank].tolist())
        last = [index for index, (kind, *_) in enumerate(actions) if kind is Kind.FORWARD][-1]
        backwards = [index for index, (kind, *_) in enumerate(actions) if kind is not Kind.FORWARD]
        if schedule.all_forwards_first:
            assert last < backwards[0]
            assert v == 1
            assert not schedule.splits_backward
        if not schedule.splits_backward:
            assert actions[-1][1] == own[rank, 0]
        for stage in own[rank]:
            for kind in Kind:
                numbers = [i for k, s, i in actions if (k, s) == (kind, stage)]
                assert numbers == sorted(numbers)
    assert all(0 <= schedule.passes_behind(stage, p) <= (p - 1) * (stage >= p) for stage in range(p * v))


@settings(deadline=None)
@given(layouts())
def test_one_forward_one_backward_is_what_it_says(layout):
    name, p, v, _ = layout
    if not get(name).one_forward_one_backward or v > 1:
        return
    for rank, actions in enumerate(orders(*layout)):
        gradients = weights = 0
        for kind, _, i in actions:
            if kind is Kind.FORWARD:
                assert gradients > i - (p - rank)
                assert not get(name).splits_backward or weights >= i - p + 1
            gradients += kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)
            weights += kind is Kind.WEIGHT_GRADIENT


@pytest.mark.parametrize("in_torch", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_what_runs_is_what_the_reasons_leave(name, in_torch):
    schedule = get(name)
    for p in range(1, 7):
        for v in range(1, 4):
            reasons = [illegal(name, p, v, m, in_torch=in_torch) for m in range(1, 25)]
            runs = schedule.runs(p, v, np.arange(1, 25), in_torch=in_torch).tolist()
            if None in reasons:
                assert [reason is None for reason in reasons] == runs
            else:
                fixed = not schedule.fewest_virtual <= v <= (schedule.most_virtual or v)
                assert fixed or p == 1 or (in_torch and not schedule.in_torch)
            assert all(reason is None or re.match(r"\w+ = '?\w+'?: ", reason) for reason in reasons)


@pytest.mark.slow
@settings(deadline=None)
@given(layouts(most_m=40), st.integers(1, 3))
def test_rows_of_a_period_come_again(layout, more):
    name, p, v, m = layout
    period = get(name).period(p, v, m)
    assume(period is not None and m >= 2 * p)
    longer = m + more * period.micro_batches
    assume(illegal(name, p, v, longer) is None and get(name).period(p, v, longer) == period)
    times = [StageTimes(1.0, 2.0, 1.0, 1.0)] * (p * v)
    added_s = makespan(name, p, v, longer, times).makespan_s - makespan(name, p, v, m, times).makespan_s
    # In equal stages a period takes as long as its busiest rank computes.
    assert added_s == pytest.approx(more * period.micro_batches * v * 3.0)


def test_a_single_rank_has_no_other_to_wait_for():
    assert {of_ranks(name, 1).name for name in EVERY} == {PLAIN}
    assert {of_ranks(name, 2).name for name in EVERY} == set(EVERY)


def test_a_schedule_that_torch_does_not_have_is_refused_where_torch_runs_it():
    assert "torch" in str(illegal("Eager1F1B", 2, 1, 4, in_torch=True))
    assert illegal("Eager1F1B", 2, 1, 4) is None


def test_a_schedules_name_stands_in_its_own_file():
    """Who else names one: the plan's type, engines that have only some and their configurations, and stand-ins for many whose choice is no rule."""
    allowed = {
        "plan.py",
        "engines/deepspeed.py",
        "engines/megatron.py",
        "export/megatron_keys.py",
        "export/nanotron.py",
        "export/torchtitan_keys.py",
        "report/binding.py",
        "search/mixed/find.py",
        "search/mixed/several.py",
        "search/mixed/space.py",
    }
    names = re.compile("|".join(f'"{name}"' for name in SCHEDULES))
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if names.search(path.read_text())} - {
        str(path.relative_to(SOURCE)) for path in (SOURCE / "schedule").glob("*.py")
    }
    assert found == allowed
