"""A list schedule does everything once, in memory, whatever its rule; and its times are the simulation's."""

from random import Random

import pytest

from ahp.schedule.legal import why_not
from ahp.schedule.simulate import peak_in_flight, simulate
from ahp.schedule.synthesis.bound import lower_bound
from ahp.schedule.synthesis.codes import as_schedule
from ahp.schedule.synthesis.listing import MANY, Rule, list_schedule
from ahp.schedule.synthesis.repeat import fewer, repeated, steady_part
from ahp.schedule.synthesis.replay import fits, peak_bytes, replay
from benchmarks.schedule_problems import PLACEMENTS, problem
from tests.schedule.synthesis.codes import as_orders


def random_rule(random, made, m):
    stages = range(made.num_stages)

    def draw():
        return tuple(random.uniform(-5.0, 5.0) for _ in stages)

    return Rule(
        draw(),
        draw(),
        draw() if made.split and random.random() < 0.7 else (),
        random.choice((0.0, 1.0, 3.0)),
        tuple(random.choice((0.0, 0.5, 1.0, 9.0)) for _ in range(made.num_ranks)),
        tuple(random.choice((1, 2, m, MANY)) for _ in stages),
    )


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_no_rule_ends_before_all_is_done_however_little_memory_there_is(kind):
    random = Random(0)
    for seed in range(150):
        p, m = random.randint(1, 5), random.randint(1, 9)
        memory = random.choice((0.0, 0.3, 0.5, 1.0, None))
        streams, send = random.random() < 0.3, random.choice((0.02, 0.02, 0.7, 3.0))
        made = problem(seed, kind, p, m, ratio=3.0, memory=memory, streams=streams, send=send)
        listed = list_schedule(made, random_rule(random, made, m), m)
        schedule = as_schedule("listed", listed.orders, made.stage_rank, m)
        assert why_not(schedule) is None
        assert as_orders(schedule) == listed.orders
        assert fits(made, listed.orders)
        again = replay(made, listed.orders)
        assert again.end_s <= listed.end_s * (1 + 1e-12)  # it may have waited where the order does not ask it to
        assert lower_bound(made).seconds <= again.end_s * (1 + 1e-12)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_replay_is_the_simulation(kind):
    random = Random(1)
    for seed in range(40):
        m = random.randint(1, 6)
        made = problem(seed, kind, 3, m, ratio=2.0, memory=random.choice((0.5, None)), streams=random.random() < 0.5)
        orders = list_schedule(made, random_rule(random, made, m), m).orders
        schedule = as_schedule("listed", orders, made.stage_rank, m)
        timeline = simulate(schedule, made.times)
        assert replay(made, orders).end_s == pytest.approx(timeline.makespan_s)
        assert [end for rank in replay(made, orders).ends_s for end in rank] == pytest.approx(
            [end for rank in timeline.ends_s for end in rank]
        )
        assert peak_bytes(made, orders) == pytest.approx(
            peak_in_flight(schedule.ranks, made.kept_bytes, made.freed_bytes)
        )


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_steady_part_repeats(kind):
    random = Random(2)
    found = 0
    for seed in range(40):
        made = problem(seed, kind, 3, 60, ratio=2.0, memory=random.choice((0.7, 1.0, None)))
        few = fewer(made, 10)
        assert (60 - few) % 12 == 0
        listed = list_schedule(made, random_rule(random, made, 60), few)
        part = steady_part(made, listed, few, 1.0)
        if part is None:
            continue
        found += 1
        orders = repeated(listed.orders, part, 60 - few)
        assert why_not(as_schedule("repeated", orders, made.stage_rank, 60)) is None
        assert peak_bytes(made, orders) == pytest.approx(peak_bytes(made, listed.orders))
    assert found >= 10


def test_weights_gathered_and_gradients_reduced_beside_the_computation():
    made = problem(0, "one", 3, 6, streams=True)
    orders = list_schedule(made, random_rule(Random(0), made, 6), 6).orders
    run = replay(made, orders)
    for stage, own in enumerate(run.ends_s):  # of the rank with the same number
        first = own[0] - made.times[stage].forward_s
        assert first >= made.times[stage].gathered_s * (1 - 1e-12)
        assert run.reduced_s[stage] == pytest.approx(own[-1] + made.times[stage].reduce_s)
    assert run.end_s == pytest.approx(max(run.reduced_s))


def test_a_rank_reduces_the_stage_that_is_done_first_while_it_computes_the_other():
    made = problem(0, "looped", 2, 4, streams=True)
    orders = list_schedule(made, random_rule(Random(3), made, 4), 4).orders
    run = replay(made, orders)
    for rank, own in enumerate(made.stages_of):
        done = {s: max(e for e, c in zip(run.ends_s[rank], orders[rank], strict=True) if c % 4 == s) for s in own}
        first, second = sorted(own, key=lambda s: done[s])
        first_s = done[first] + made.times[first].reduce_s
        assert run.reduced_s[rank] == pytest.approx(max(done[second], first_s) + made.times[second].reduce_s)
