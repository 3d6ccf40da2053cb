"""Cost, tokens a day and fewest devices: the best number of devices is that of trying each, and figures add up."""

from __future__ import annotations

import pickle
import re
from functools import cache
from typing import Any

import pytest

from ahp.cluster.model import Cluster, Host
from ahp.cluster.reliability import Failures, defaults
from ahp.errors import BadInput, NothingFits
from ahp.search import counts
from ahp.search.counts import choose, smaller
from ahp.search.objective import Scale, checkpoint_bytes, objective_of
from ahp.search.problem import Problem
from ahp.search.ranking import search
from tests.search.small import SEQUENCE, graph, small

NODES = "2x2xH100-SXM-80GB"
BATCH, FIXED = 32, {"micro_batch_size": 2}
"""Small micro-batches, so that a model of this size takes longer on fewer devices."""
ALONE = {
    "micro_batch_size": 2,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "activation_checkpoint": "none",
}
JOB = {"sequence_length": SEQUENCE, "global_batch_size": BATCH}
OFTEN = {"failures_per_device_hour": 160.0, "checkpoint_blocks_s": 0.5, "restart_s": 3.0}
"""So often that devices beyond a few cost more than they bring."""
AIMS: tuple[dict[str, Any], ...] = (
    {"name": "cost", "price_per_device_hour": 2.0},
    {"name": "tokens-per-day"},
    {"name": "tokens-per-day", **OFTEN},
    {"name": "fewest-devices", "target_tokens_per_s": 15_000.0},
)


@pytest.mark.parametrize(
    ("blocks_s", "restart_s", "goodput"), [(60, 600, 0.842), (1, 600, 0.933), (1, 120, 0.976), (1, 948, 0.901)]
)
def test_goodput_of_llama_3s_failures(blocks_s: float, restart_s: float, goodput: float) -> None:
    """One failure in 3.09 h, the mean of its 54 days."""
    failures = Failures(per_s=1 / (3.09 * 3600), checkpoint_blocks_s=blocks_s, restart_s=restart_s)
    assert failures.goodput == pytest.approx(goodput, abs=5e-4)


def test_no_other_interval_loses_less() -> None:
    failures = Failures(per_s=1e-4, checkpoint_blocks_s=20, restart_s=300)

    def left(interval_s: float) -> float:
        lost = failures.checkpoint_blocks_s / interval_s + failures.per_s * (interval_s / 2 + failures.restart_s)
        return 1 - lost

    best_s = failures.best_interval_s
    assert failures.goodput == pytest.approx(left(best_s))
    assert max(left(best_s * share) for share in (0.5, 0.9, 1.1, 2.0)) < failures.goodput


@cache
def asked() -> Problem:
    return small(cluster=NODES, batch=BATCH, constraints=FIXED)


@cache
def step_times() -> list[tuple[Cluster, float]]:
    """The shortest step on each number of devices, each by a search of its own."""
    found = []
    for cluster in smaller(asked().cluster):
        best = search(graph("llama"), cluster, JOB, constraints=FIXED, engine=asked().engine, keep=1).fastest.forecast
        assert best is not None
        found.append((cluster, best.step_time_s))
    return found


@pytest.mark.parametrize("aim", AIMS, ids=str)
def test_the_number_of_devices_is_the_best_of_trying_each(aim: dict[str, Any]) -> None:
    objective = objective_of(aim)
    worths = [Scale(objective, asked()).worth(cluster, step_s) for cluster, step_s in step_times()]
    if aim["name"] == "fewest-devices":
        worths = [worth for worth in worths if worth.figures["tokens_per_s"] >= aim["target_tokens_per_s"]]
        worths.sort(key=lambda worth: worth.devices)
    else:
        worths.sort(key=lambda worth: (worth.score, worth.devices))
    choice = choose(asked(), objective, 10)
    found = [one.worth for one in (choice.first, *choice.others) if one.worth]
    assert [worth.devices for worth in found] == [worth.devices for worth in worths]
    assert [worth.score for worth in found] == pytest.approx([worth.score for worth in worths])
    assert choice.proven
    assert choose(asked(), objective, 1).first.devices == choice.first.devices


def test_failures_make_fewer_devices_the_better_choice() -> None:
    seldom, often = (choose(asked(), objective_of(aim), 3).first.devices for aim in AIMS[1:3])
    assert (seldom, often) == (4, 2)


@pytest.mark.parametrize(
    ("aim", "told"), [(AIMS[0], "costs as much, 1.00 times"), (AIMS[1], "as many tokens a day, 1.00 times")]
)
def test_what_is_worth_as_much_is_not_worth_more_or_less(aim: dict[str, Any], told: str) -> None:
    scale = Scale(objective_of(aim), asked())
    one, other = (scale.worth(asked().cluster, step_s) for step_s in (1.0, 1.0001))
    assert scale.compared(other, one).startswith(told)


@pytest.mark.parametrize("aim", [AIMS[0], AIMS[1], {"name": "fewest-devices", "target_tokens_per_s": 1.0}], ids=str)
def test_of_a_mixed_cluster_each_part_is_told_once(aim: dict[str, Any]) -> None:
    groups = [{"name": name, "device": name, "devices_per_node": 1} for name in ("H100-SXM-80GB", "A100-SXM-80GB")]
    of = small(cluster=Cluster.from_dict({"groups": groups}), batch=2, constraints=ALONE)
    choice = choose(of, objective_of(aim), 10)
    assert [one.devices for one in (choice.first, *choice.others)] == [1, 1], "both together are slower than either"
    assert choice.proven
    assert "1 device, the best of 2 parts of the cluster (1 device), found in " in choice.words()
    assert "the best plan of 1 is worse (proven)" in choice.words()
    told = choice.scale.compared(*(one.worth for one in (choice.others[0], choice.first) if one.worth))
    assert "misses the target" not in told


def test_the_ranking_is_of_numbers_of_devices() -> None:
    ranking = search(
        graph("llama"), NODES, JOB, constraints=FIXED, objective=AIMS[0], current={"tensor_parallel_degree": 2}
    )
    devices = [plan.parallelism.world_size for plan in ranking]
    assert devices == [int(worth.devices) for worth in ranking.worth]
    assert len(set(devices)) == len(devices) > 2
    assert ranking.best.why[0].startswith("cheapest: ")
    assert re.match(r"costs .* % more, ", ranking.plans[1].why[0])
    assert ranking.current is not None
    assert ranking.current.forecast is not None
    for plan, worth in zip(ranking.plans, ranking.worth, strict=True):
        assert Cluster.resolve(plan.cluster or {}).num_devices == worth.devices
        paid = 2.0 * worth.devices / 3600 * plan.forecast.step_time_s  # type: ignore[union-attr]
        assert worth.figures["cost_per_token"] == pytest.approx(paid / (BATCH * SEQUENCE))


def test_a_ranking_by_an_objective_goes_to_another_process() -> None:
    ranking = search(graph("llama"), NODES, JOB, constraints=FIXED, objective=AIMS[0])
    found = pickle.loads(pickle.dumps(ranking))
    assert ranking.choice is not None
    assert (found.plans, found.worth, str(found)) == (ranking.plans, ranking.worth, str(ranking))
    assert found.choice.words() == ranking.choice.words()


def test_a_bound_ends_what_cannot_be_among_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = []

    def watched(problem: Any, ceiling_s: float = float("inf")) -> Any:
        ceilings.append(ceiling_s)
        return fastest(problem, ceiling_s)

    fastest = counts.fastest
    monkeypatch.setattr(counts, "fastest", watched)
    choice = choose(asked(), objective_of("tokens-per-day"), 1)
    assert ceilings[0] == float("inf")
    assert max(ceilings[1:]) < float("inf")
    assert choice.proven
    assert len(choice.without) == len(ceilings) - 1


@pytest.mark.parametrize(
    ("aim", "told"),
    [
        ("cheap", "objective = 'cheap'"),
        ("cost", "price_per_device_hour = None"),
        ("fewest-devices", "target_tokens_per_s = None"),
        ({"name": "speed", "restart_s": 5}, "objective.restart_s = 5.0: the objective speed does not read it"),
        ({"name": "cost", "price_per_device_hour": -1.0}, "price_per_device_hour"),
        ({"name": "cost", "price_per_device_hour": "two"}, "price_per_device_hour = 'two': must be a price above 0"),
        ({"name": "cost", "price": 1.0}, "unknown key"),
        ({"name": "cost", "price_per_device_hour": {"A100": 1.0}}, "no such device .valid: H100-SXM-80GB"),
        ({"name": "cost", "price_per_device_hour": {}}, "no price for H100-SXM-80GB"),
        ({"name": "tokens-per-day", "failures_per_device_hour": 1e9}, "leaves no time to train"),
    ],
)
def test_what_an_objective_cannot_be_is_refused(aim: Any, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        search(graph("llama"), "2xH100-SXM-80GB", JOB, objective=aim)


def test_failures_that_leave_no_time_are_refused_by_the_key_that_says_them() -> None:
    cluster = {"nodes": 1, "devices_per_node": 2, "device": "H100-SXM-80GB", "failures_per_device_hour": 1e9}
    with pytest.raises(BadInput, match=r"^cluster.failures_per_device_hour = 1e\+09: a failure every "):
        search(graph("llama"), cluster, JOB, objective="tokens-per-day")


def test_an_objective_is_searched_exactly() -> None:
    with pytest.raises(BadInput, match="method = 'anneal': the objective tokens-per-day is searched exactly"):
        search(graph("llama"), "2xH100-SXM-80GB", JOB, objective="tokens-per-day", method="anneal")


@pytest.mark.slow
def test_a_target_out_of_reach_says_what_would_reach_it() -> None:
    speed = asked().job.tokens_per_step / step_times()[-1][1]
    aim = {"name": "fewest-devices", "target_tokens_per_s": 1.0001 * speed}
    with pytest.raises(NothingFits, match="out of reach: the fastest layout of 4 devices"):
        search(graph("llama"), NODES, JOB, constraints=FIXED, engine=asked().engine, objective=aim)
    reached = choose(asked(), objective_of(aim | {"target_tokens_per_s": speed}), 1)
    assert reached.first.devices == 4
    assert reached.proven


def test_a_target_out_of_reach_of_a_mixed_cluster() -> None:
    groups = [{"name": name, "device": name, "devices_per_node": 1} for name in ("H100-SXM-80GB", "A100-SXM-80GB")]
    of = small(cluster=Cluster.from_dict({"groups": groups}), batch=2, constraints=ALONE)
    with pytest.raises(NothingFits, match="out of reach: the fastest layout of 2 devices"):
        choose(of, objective_of({"name": "fewest-devices", "target_tokens_per_s": 1e12}), 1)


def test_numbers_of_devices_that_are_tried() -> None:
    def sizes(text: str) -> list[int]:
        return [cluster.num_devices for cluster in smaller(Cluster.parse(text))]

    assert sizes("H100-SXM-80GB") == [1]
    assert sizes("7xH100-SXM-80GB") == [1, 2, 3, 4, 5, 6, 7]
    assert sizes("3x4xH100-SXM-80GB") == [1, 2, 3, 4, 8, 12]
    many = sizes("100x1xH100-SXM-80GB")
    assert many == [*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100]


@pytest.mark.slow
def test_what_can_be_used_of_each_node_is_tried_too() -> None:
    """24 devices do not divide the batch; 16 do, as four of each node."""
    asked = graph("llama"), "4x6xH100-SXM-80GB", {"sequence_length": SEQUENCE, "global_batch_size": 1024}
    by_speed, by_tokens = (
        search(*asked, constraints=FIXED, engine={"name": "accelerate"}, objective=name)
        for name in ("speed", "tokens-per-day")
    )
    assert by_speed.best.parallelism.world_size == by_tokens.best.parallelism.world_size == 16


def test_a_checkpoint_takes_what_the_measured_storage_takes() -> None:
    scale = Scale(objective_of("tokens-per-day"), asked())
    assert scale.failures(asked().cluster).checkpoint_blocks_s == defaults.value("checkpoint_blocks_s")
    # fp32 weights and two fp32 moments.
    assert checkpoint_bytes(asked()) == 12 * asked().graph.num_parameters
    for kind, at_once in (("nvme", 2), ("network", 1)):
        host = Host(storage_kind=kind, storage_write_bytes_per_s=1e6)
        group = asked().cluster.groups[0].model_copy(update={"host": host})
        cluster = asked().cluster.model_copy(update={"groups": (group,)})
        seconds = Scale(objective_of("tokens-per-day"), asked().on(cluster)).failures(cluster).checkpoint_blocks_s
        assert seconds == pytest.approx(checkpoint_bytes(asked()) / (at_once * 1e6))
