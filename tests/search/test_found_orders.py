"""Schedules made for the best layouts' own stages: answered where they pay, no slower than the fixed patterns, and with what is proven."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import ahp
from ahp.cluster.cells import place
from ahp.cluster.model import Cluster
from ahp.errors import BadInput, NotExpressible
from ahp.forecast.found_order import ToOrder
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Plan
from ahp.schedule.orders import given_order
from ahp.search.found_orders import _promising as promising
from ahp.search.result import Ranking
from ahp.search.ties import TIED

JOB = Job(sequence_length=512, global_batch_size=16, precision="bf16")
ALIKE = "1x4xH100-SXM-80GB"
MIXED = {
    "groups": [
        {"name": "a", "nodes": 1, "devices_per_node": 2, "device": "H100-SXM-80GB"},
        {"name": "b", "nodes": 1, "devices_per_node": 2, "device": "A100-SXM-80GB"},
    ]
}
SLOW = {"nodes": 4, "devices_per_node": 1, "device": "A100-SXM-80GB", "inter_node_gbps": 10}
"""What is sent takes a good part of a forward, for which no fixed pattern is made."""
ENGINE = EngineChoice(compile=False)
ONE_EACH = {"pipeline_parallel_degree": 4, "virtual_stages_per_rank": 1, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    """A head that costs as much as some layers."""
    return ahp.analyze(
        {
            "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
            "num_attention_heads": 8, "vocab_size": 32_000,
        },
        JOB,
    )  # fmt: skip


def searched(graph: ModelGraph, cluster: object, engine: EngineChoice = ENGINE, **keys: object) -> Ranking:
    return ahp.search(graph, cluster, JOB, constraints={**ONE_EACH, **keys}, engine=engine)  # type: ignore[arg-type]


def step_s(plan: Plan) -> float:
    assert plan.forecast is not None
    return plan.forecast.step_time_s


PATTERNS = ("GPipe", "1F1B", "InterleavedZeroBubble")


@pytest.mark.parametrize("cluster", [ALIKE, MIXED, SLOW], ids=["alike", "mixed", "slow network"])
def test_what_is_left_open_is_found_where_it_pays(graph: ModelGraph, cluster: object, tmp_path: Path) -> None:
    open_ = searched(graph, cluster)
    fixed_s = min(step_s(searched(graph, cluster, pipeline_parallel_schedule=name).fastest) for name in PATTERNS)
    own, best = open_.own_order, open_.best
    assert own is not None
    assert own.gain == pytest.approx(1 - min(step_s(best), fixed_s * (1 - own.gain)) / fixed_s)
    assert own.leads == (own.gain > TIED)
    assert own.leads or cluster is not SLOW
    if own.leads:
        assert best.parallelism.pipeline_parallel_schedule == "Synthesized"
        assert step_s(best) < fixed_s * (1 - TIED)
        assert best.forecast is not None
        assert best.forecast.fits
        assert open_.fastest is best
        if open_.families:  # what was the first leads them
            assert [step_s(plan) for plan in open_.families] == sorted(map(step_s, open_.families))
            assert len({plan.parallelism for plan in open_.families}) == len(open_.families)
        assert best.why[1:4] == open_.proof
        assert "all this is about torch's fixed patterns" in open_.proof[2]
        assert any("a schedule made for these stages takes" in line for line in best.why)
        assert all(step_s(plan) > step_s(best) for plan in open_.plans[1:])
        again = ahp.simulate(
            model=graph,
            cluster=cluster,
            job=JOB,
            parallelism=best.parallelism,
            engine=best.engine,  # type: ignore[arg-type]
        )
        assert again == best.forecast
        best.save(tmp_path / "plan.yaml")
        assert Plan.load(tmp_path / "plan.yaml") == best
    else:
        assert best.parallelism.pipeline_parallel_schedule in PATTERNS
        assert open_.proof == open_.certificate.lines()


def test_the_best_of_each_family_stays_in_the_table(graph: ModelGraph) -> None:
    keys = {"pipeline_parallel_degree": 4, "micro_batch_size": 1}
    patterns = {}
    for name in (*PATTERNS, None):
        schedule = {} if name is None else {"pipeline_parallel_schedule": name}
        ranking = ahp.search(graph, SLOW, JOB, constraints={**keys, **schedule}, engine=ENGINE)
        patterns[name] = ranking
    assert patterns[None].own_order is not None
    assert patterns[None].own_order.leads
    assert len(patterns[None].families) >= max(len(patterns[name].families) for name in PATTERNS)


def test_memory_is_that_of_the_device_that_is_full(graph: ModelGraph) -> None:
    """Of a mixed cluster, where devices are of two sizes."""
    far = {"nodes": 2, "devices_per_node": 1, "inter_node_gbps": 10}
    cluster = Cluster.from_dict(
        {
            "groups": [
                {"name": "a", "device": "H100-SXM-80GB", **far},
                {"name": "b", "device": "A100-SXM-40GB", **far},
            ],
            "links": [{"between": ["a", "b"], "gbps": 10}],
        }
    )
    ranking = searched(graph, cluster)
    best = ranking.best
    assert best.parallelism.pipeline_parallel_schedule == "Synthesized"
    assert best.forecast is not None
    name = place(cluster, best.parallelism).group_of(best.forecast.fullest_rank)
    [group] = [group for group in cluster.groups if group.name == name]
    [line, *_] = [line for line in best.why if line.startswith("memory: ")]
    assert f" of {group.device.memory_bytes / 2**30:.1f} GiB" in line


@pytest.mark.slow
def test_nothing_is_looked_for_where_the_bubble_is_small(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object, **__: object) -> None:
        raise AssertionError("nothing can be gained here")

    monkeypatch.setattr(ToOrder, "of", no)
    ranking = ahp.search(graph, ALIKE, JOB, engine=ENGINE, keep=3)
    assert ranking.own_order is None
    assert ranking.best.parallelism.pipeline_parallel_degree == 1


def test_a_schedule_that_is_fixed_stays(graph: ModelGraph) -> None:
    ranking = searched(graph, ALIKE, pipeline_parallel_schedule="GPipe")
    assert ranking.best.parallelism.pipeline_parallel_schedule == "GPipe"
    assert ranking.own_order is None


def test_another_engine_says_why_it_has_none(graph: ModelGraph) -> None:
    ranking = searched(graph, ALIKE, EngineChoice(name="torchtitan"))
    assert ranking.own_order is None
    [line] = [line for line in ranking.best.why if line.startswith("no schedule made for its stages")]
    assert "'Synthesized': torchtitan" in line
    with pytest.raises(NotExpressible, match="Synthesized"):
        searched(graph, ALIKE, EngineChoice(name="torchtitan"), pipeline_parallel_schedule="Synthesized")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [ALIKE, MIXED], ids=["alike", "mixed"])
def test_what_is_asked_for_is_found_for_every_pipeline(graph: ModelGraph, cluster: object, tmp_path: Path) -> None:
    patterns = ahp.search(
        graph,
        cluster,
        JOB,
        constraints={**ONE_EACH, "pipeline_parallel_schedule": "1F1B"},
        engine=ENGINE,  # type: ignore[arg-type]
    )
    found = searched(graph, cluster, pipeline_parallel_schedule="Synthesized")
    assert step_s(found.best) <= step_s(patterns.fastest)
    assert [step_s(plan) for plan in found.plans] == sorted(map(step_s, found.plans))
    for plan in found.plans:
        assert plan.parallelism.pipeline_parallel_schedule == "Synthesized"
        assert plan.fixed["pipeline_parallel_schedule"] == "Synthesized"
        assert given_order(plan.parallelism) is not None
    found.best.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == found.best


def test_replicas_with_unlike_micro_batches_get_an_order_each(graph: ModelGraph) -> None:
    keys = {
        "pipeline_parallel_degree": 2,
        "virtual_stages_per_rank": 1,
        "data_parallel_replicate_degree": 2,
        "micro_batch_size": 1,
        "micro_batches_per_replica": (10, 6),
        "pipeline_parallel_schedule": "Synthesized",
    }
    best = ahp.search(graph, MIXED, JOB, constraints=keys, engine=ENGINE).best.parallelism
    assert best.micro_batches_per_replica == (10, 6)
    orders = [given_order(best, replica) for replica in (0, 1)]
    assert [order.num_micro_batches for order in orders if order is not None] == [10, 6]


def test_a_layout_without_a_pipeline_stays_as_it_is(graph: ModelGraph) -> None:
    keys = {"pipeline_parallel_schedule": "Synthesized"}
    best = ahp.search(graph, "1x1xH100-SXM-80GB", JOB, constraints=keys, engine=ENGINE).best
    assert best.parallelism.pipeline_parallel_degree == 1
    assert best.parallelism.pipeline_parallel_order is None


def test_what_runs_today_with_an_order_of_its_own_is_a_candidate(graph: ModelGraph) -> None:
    best = searched(graph, SLOW).best
    again = ahp.search(graph, SLOW, JOB, constraints=ONE_EACH, engine=ENGINE, current=best.parallelism)
    assert again.best.parallelism == best.parallelism
    assert again.current is not None
    assert again.current.against_best == "it is the best"
    pattern = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "1F1B", "micro_batch_size": 1}
    slower = ahp.search(graph, SLOW, JOB, constraints=ONE_EACH, engine=ENGINE, current=pattern).current
    assert slower is not None
    assert "slower" in slower.against_best


def test_other_objectives_compare_fixed_patterns(graph: ModelGraph) -> None:
    keys = {**ONE_EACH, "pipeline_parallel_schedule": "Synthesized"}
    with pytest.raises(BadInput, match="the objective cost compares layouts under fixed patterns"):
        ahp.search(
            graph, SLOW, JOB, constraints=keys, engine=ENGINE, objective={"name": "cost", "price_per_device_hour": 2}
        )


def test_a_given_order_is_not_searched(graph: ModelGraph) -> None:
    with pytest.raises(BadInput, match="the search finds orders itself"):
        searched(graph, ALIKE, pipeline_parallel_schedule="Synthesized", pipeline_parallel_order=("0F0,0B0", "1F0,1B0"))


def test_a_longer_order_than_is_looked_for_is_named(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ahp.search.found_orders.MOST_ACTIONS", 10)
    ranking = searched(graph, ALIKE)
    assert ranking.own_order is None
    assert any("192 actions, more than 10" in line for line in ranking.best.why)
    with pytest.raises(BadInput, match="'Synthesized': no schedule made for its stages: 192 actions"):
        searched(graph, ALIKE, pipeline_parallel_schedule="Synthesized")


def test_those_with_the_lowest_floors_and_the_fastest_take_turns() -> None:
    floors_s, times_s = [1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 8.0], [9.0, 12.0, 10.0, 8.0, 15.0, 11.0, 14.0]
    pairs = [
        (SimpleNamespace(number=number, priced=SimpleNamespace(step_time_s=time_s)), SimpleNamespace(floor_s=floor_s))
        for number, (floor_s, time_s) in enumerate(zip(floors_s, times_s, strict=True))
    ]

    def found(limit_s: float) -> list[int]:
        return [plan.number for plan, _ in promising(pairs, limit_s)]  # type: ignore[arg-type, attr-defined]

    # By floors 0 2 4 1 3 5 6, by times 3 0 2 5 1 6 4: each once, the first six.
    assert found(9.0) == [0, 3, 2, 4, 1, 5]
    # Those that no order makes fast enough take nobody's turn: by floors 0 2 4 1, by times 0 2 1 4.
    assert found(6.0) == [0, 2, 4, 1]
